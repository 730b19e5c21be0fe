"""What a training forward may write besides its result: found by walking objects, and by reading source."""
