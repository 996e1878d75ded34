"""The run, the train step, the loop and the evaluation."""
