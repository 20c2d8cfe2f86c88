"""The paper's tables: which systems, trained how, and the published values beside ours."""
