"""Networks, and the layers and units that are found in any network."""

from fedp3.models import hf as hf  # registers its network
from fedp3.models import transformers as transformers  # registers its networks
