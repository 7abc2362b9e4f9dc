from hypothesis import settings

# a busy machine, or the first import of SciPy, is no failure
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
