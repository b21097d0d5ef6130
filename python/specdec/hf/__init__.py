"""At home in transformers: model.generate with custom_generate."""
