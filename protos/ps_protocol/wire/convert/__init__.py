"""Generated messages into dataclasses and back, checked on the way in; the only modules that name both."""
