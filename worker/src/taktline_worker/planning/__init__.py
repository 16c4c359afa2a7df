"""Planning: a search over action sequences, scored by a world model, on one device or on a mesh of them."""
