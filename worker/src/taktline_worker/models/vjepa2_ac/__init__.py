"""V-JEPA 2-AC: a frozen image encoder and an action-conditioned predictor, planned over in latent space."""
