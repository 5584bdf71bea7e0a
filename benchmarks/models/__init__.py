"""Small models of many libraries, each with a batch and a loss, on which every plan is tried."""
