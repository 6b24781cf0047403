"""An experiment: a recipe, carried out in a run folder."""
