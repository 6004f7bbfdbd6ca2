"""Names of modules, and the engines that note what runs."""
