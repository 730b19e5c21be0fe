"""What the pretended devices share: building their libraries, the cells under test, and tables."""
