"""Networks, and the layers and units that are found in any network."""
