"""``python -m tests.nightly``: runs every test that is marked ``nightly`` or ``nvcc``, in parts of minutes, and a slice
of the everyday suite on the oldest and the newest torch and transformers. What came out is written to results.json
after each part. See CONTRIBUTING.md."""
