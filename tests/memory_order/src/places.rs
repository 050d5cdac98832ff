//! Finds the function and the line of code at a place in the source, so that a table of memory
//! orders needs no numbers of lines.

use std::fs;
use std::path::Path;

use crate::weak::Point;

/// A half of a memory order, as a reader of the table knows it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    /// The file, from the root of the repository on.
    pub(crate) file: String,
    /// The function, with the type to which it belongs.
    pub(crate) function: String,
    /// The line of code.
    pub(crate) code: String,
    /// The half that can be weakened.
    pub(crate) half: &'static str,
}

/// Returns the place of a point.
pub(crate) fn place(point: &Point) -> Place {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.ancestors().nth(2).expect("the package is in tests/");
    let path = package.join(&point.file).canonicalize().expect("the source is where it was compiled");
    let text = fs::read_to_string(&path).expect("the source can be read");
    let lines: Vec<&str> = text.lines().collect();
    let before = &lines[..point.line as usize];
    let name = |line: &str, word: &str| {
        let rest = line.trim_start().split(word).nth(1)?;
        Some(rest.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect::<String>())
    };
    let is_start = |line: &&&str, word: &str| {
        let line = line.trim_start();
        let line = line.trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ").trim_start_matches("pub ");
        line.trim_start_matches("unsafe ").trim_start_matches("const ").starts_with(word)
    };
    let function = before.iter().rev().find(|line| is_start(line, "fn ")).copied().unwrap_or_default();
    let mut function_name = name(function, "fn ").unwrap_or_default();
    if function.starts_with(' ') {
        let block = before.iter().rev().find(|line| line.starts_with("impl")).copied().unwrap_or_default();
        let block = block.trim_start_matches("impl").trim_end_matches(" {");
        // The generic parameters of the block come first, and those of the type last.
        let block = if block.starts_with('<') { block.rsplit("> ").next().unwrap_or(block) } else { block };
        let block = block.split(" for ").last().unwrap_or_default().split('<').next().unwrap_or_default();
        function_name = format!("{}::{function_name}", block.trim());
    }
    Place {
        file: path.strip_prefix(root).unwrap_or(&path).display().to_string(),
        function: function_name,
        code: lines[point.line as usize - 1].trim().to_owned(),
        half: point.half.name(),
    }
}
