"""HTTP in, tokens to and from the workers: APIs (`http`), administration (`admin`), text and tokens (`text`),
worker processes and other machines (`workers`), and the web page (`console`)."""
