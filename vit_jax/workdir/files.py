"""Names of what a work directory holds."""

CHECKPOINTS = "checkpoints"
MODEL_FILE = "model.json"
PARAMETERS_FILE = "parameters.txt"
PARAMS_FILE = "params.npz"
RESULTS_FILE = "results.json"
