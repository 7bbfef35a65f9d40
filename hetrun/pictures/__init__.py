"""Pictures for models that read them: strangers' files become pixels, in a process that may be killed."""
