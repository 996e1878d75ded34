"""From files to batches: data sets, the order of samples, augmentation and loading."""
