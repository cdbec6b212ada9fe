"""The calculations of `tandem plan`: predictions for a model on a device, and measurements to compare with."""
