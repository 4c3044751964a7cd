"""Weight sync: from the trainer's ranks to the engines, versioned, checksummed, all or nothing."""
