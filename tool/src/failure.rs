//! The error that ends a subcommand.

/// Why a subcommand could not do its work.
pub struct Failure {
    /// The exit code of the tool.
    pub code: u8,
    /// One line for standard error. `main` escapes the characters that act on a terminal.
    pub message: String,
}

impl Failure {
    pub fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }
}
