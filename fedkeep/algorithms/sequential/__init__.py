"""Methods whose clients train one after another, each from the model that the client before it left."""
