"""Reading published weights: whole versions, received beside what the reader has and checked."""
