"""Tables: columns by name, from frames and files, encoded by scikit-learn transformers fitted across sites."""
