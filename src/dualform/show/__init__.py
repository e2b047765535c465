"""What people see: the command line, figures (``dualform.plot``), the report and the web explorer."""
