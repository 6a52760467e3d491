"""Fleet files: what they may say, and all that is refused in them."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedp3.core.errors import InputError
from fedp3.devices.fleet_file import COLUMNS, extend, read_fleet, read_to_extend, write_fleet
from fedp3.devices.table import DEVICES, NUMBERS, Device

HEADER = ",".join(COLUMNS)
positive = st.floats(1e-6, 1e9)
names = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=20
)
own_devices = st.builds(
    Device,
    name=names.filter(lambda name: name.strip() == name),
    kind=st.just("own"),
    memory_mb=positive,
    gflops=positive,
    mbps_down=positive,
    mbps_up=positive,
    available=st.floats(1e-6, 1),
    source=st.just(""),
)


@pytest.fixture
def file(tmp_path):
    def write(*lines: str, header: str = HEADER) -> Path:
        path = tmp_path / "fleet.csv"
        path.write_text("\n".join([header, *lines]) + "\n")
        return path

    return write


def refused(path: Path, clients: int | None = None) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_fleet(path, clients)
    return [line.strip() for line in str(caught.value).splitlines()]


# --------------------------------------------------------------------------- what they may say


@given(st.lists(st.one_of(st.sampled_from(list(DEVICES.values())), own_devices), min_size=1))
def test_what_is_written_is_read_to_the_bit(devices):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "f.csv"
        write_fleet(path, devices)
        read = read_fleet(path, len(devices))
    for wrote, got in zip(devices, read, strict=True):
        assert got.name == wrote.name or got.name in DEVICES
        assert all(getattr(got, n) == getattr(wrote, n) for n in NUMBERS)


def test_a_known_device_fills_what_a_line_leaves_empty(file):
    (device,) = read_fleet(file("0,pixel-3,,,,,"))
    assert device is DEVICES["Pixel 3"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_line_overrules_a_number_and_says_so(number, file):
    cells = ["0.25" if column == number else "" for column in NUMBERS]
    (device,) = read_fleet(file(f"0,Pixel 3,{','.join(cells)}"))
    known = DEVICES["Pixel 3"]
    assert device == replace(known, source=device.source, **{number: 0.25})
    assert device.source.startswith(f"{number}: fleet.csv, line 2. The rest: RAM, year")


def test_an_own_device_needs_no_table(file):
    (device,) = read_fleet(file("0,my-box,2000,5,10,2,0.5"))
    assert device == Device(
        name="my-box",
        kind="own",
        memory_mb=2000,
        gflops=5,
        mbps_down=10,
        mbps_up=2,
        available=0.5,
        source="fleet.csv, line 2",
    )


def test_columns_and_clients_may_have_any_order_and_columns_may_be_absent(file):
    fleet = read_fleet(file("jetson-nano,1", "", "Pixel 3 , 0", header="name,client"))
    assert [d.name for d in fleet] == ["Pixel 3", "jetson-nano"]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "f.csv"
    path.write_bytes(b"\xef\xbb\xbf" + HEADER.encode() + b"\r\n0,Pixel 3,,,,,\r\n")
    assert read_fleet(path) == (DEVICES["Pixel 3"],)


# --------------------------------------------------------------------------- what is refused


def test_all_mistakes_of_a_file_are_listed_with_their_lines(file):
    path = file(
        "0,Pixel 3,,,,,",
        "1,Pixel 33,,,,,",
        "2,my-box,-5,x,10,2,1.5",
        "0,Pixel 3,,,,,",
        "-1,Pixel 3,,,,,",
        "3,Pixel 3,,,",
        "5,,1,1,1,1,1",
        "6,my-box,nan,inf,1_0,1,1",
    )
    title, *listed = refused(path, 6)
    assert title.endswith("fleet.csv has 13 mistakes:")
    assert sorted(listed) == sorted(
        [
            "line 3: unknown device 'Pixel 33' (did you mean 'Pixel 3'?), and no value for "
            "memory_mb, gflops, mbps_down, mbps_up, available; name a known device, or fill in "
            "all columns",
            "line 4: gflops is 'x', want a number",
            "line 4: memory_mb is -5, want a number above 0",
            "line 4: available is 1.5, want a share of time in (0, 1]",
            "line 5: client 0 has line 2 already",
            "line 6: the client is '-1', want an integer from 0",
            "line 7: 5 cells, want 7",
            "line 8: the name is empty",
            "line 9: memory_mb is 'nan', want a number",
            "line 9: gflops is 'inf', want a number",
            "line 9: mbps_down is '1_0', want a number",
            "no line for clients 3, 4; 6 clients are numbered from 0 to 5 without a hole",
            "a line for client 6, but the run has 6 clients",
        ]
    )


def test_a_hole_in_the_numbers_of_clients_is_refused(file):
    listed = refused(file("0,Pixel 3,,,,,", "2,Pixel 3,,,,,"))
    assert "no line for client 1" in listed[1]


def test_a_client_with_two_lines_is_refused_even_if_the_first_is_wrong(file):
    listed = refused(file("0,Pixel 3,-1,,,,", "0,Pixel 3,,,,,"))
    assert listed[2] == "line 3: client 0 has line 2 already"


@pytest.mark.parametrize(
    "header",
    ["client", "name,gflops", "client,name,speed", "client,name,name", "client;name", "0,Pixel 3"],
)
def test_wrong_columns_are_refused(header, file):
    assert HEADER in refused(file("0,Pixel 3", header=header))[0]


@pytest.mark.parametrize("text", ["", "\n\n", HEADER + "\n"])
def test_a_file_without_a_client_is_refused(text, tmp_path):
    (tmp_path / "f.csv").write_text(text)
    assert HEADER in refused(tmp_path / "f.csv")[0]


def test_a_file_that_is_no_csv_is_refused(tmp_path):
    (tmp_path / "f.csv").write_text(HEADER + '\n0,"Pixel 3,,,,,\n')
    assert "is not CSV" in refused(tmp_path / "f.csv")[0]


def test_very_many_mistakes_are_cut_short(file):
    listed = refused(file(*[f"{i},nothing,,,,," for i in range(200)]))
    assert len(listed) == 52 and listed[-1] == "and 150 more"


# --------------------------------------------------------------------------- more lines


def box(gflops: float) -> Device:
    return replace(DEVICES["jetson-nano"], name='a "box", mine', gflops=gflops)


def test_lines_are_added_to_a_new_file_and_to_an_old_one(tmp_path):
    path = tmp_path / "f.csv"
    extend(path, 1, box(3.5))
    assert set(read_to_extend(path)) == {1}, "a file may lack clients until it is used"
    extend(path, 0, box(0.1))
    assert [d.gflops for d in read_fleet(path)] == [0.1, 3.5]


def test_the_lines_that_a_file_has_stay_as_they_are(tmp_path):
    path = tmp_path / "f.csv"
    old = "name,client,gflops,memory_mb,mbps_up,mbps_down,available\npixel-3 ,0,,,,,"
    path.write_text(old)
    extend(path, 1, box(2.0))
    assert path.read_text().startswith(old + "\n")
    assert read_fleet(path)[1].gflops == 2 and read_fleet(path)[1].memory_mb == 4000


def test_a_file_without_all_columns_gets_no_line(tmp_path):
    (tmp_path / "f.csv").write_text("client,name\n0,Pixel 3\n")
    with pytest.raises(InputError, match="lacks the columns available, gflops"):
        read_to_extend(tmp_path / "f.csv")
