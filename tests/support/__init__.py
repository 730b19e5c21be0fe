"""What the tests share: networks, their data and controls, and programs that tests run in processes of their own."""
