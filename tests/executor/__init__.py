"""Steps as they run: passes, stages, whole models, what is counted meanwhile."""
