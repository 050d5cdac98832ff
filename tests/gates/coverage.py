def gate():
    return "todo"
