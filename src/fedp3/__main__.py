"""`python -m fedp3`."""

from fedp3.cli import main

if __name__ == "__main__":
    main()
