"""A frozen diffusion model generates images of the classes that prototypes describe."""
