//! Finds the function and the line of code at a place in the source, so that a table of memory
//! orders needs no numbers of lines.

use std::collections::BTreeSet;
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

/// Returns the places of the orders stronger than relaxed that no model has met, in the files of
/// which the models have met others.
pub(crate) fn unmet(met: &[&Point]) -> Vec<Place> {
    let files: BTreeSet<&str> = met.iter().map(|point| &*point.file).filter(|file| file.contains("..")).collect();
    let mut unmet = Vec::new();
    for file in files {
        let text = source(file).1;
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for (number, code) in (1..).zip(product.lines()) {
            let code = code.split("//").next().unwrap_or_default();
            let is_strong = ["Acquire", "Release", "AcqRel", "SeqCst"].iter().any(|order| code.contains(order));
            // A long call has its order some lines after the name of the function.
            let names = [".load(", ".store(", ".swap(", ".fetch_", ".compare_exchange(", "fence("];
            let lines = if names.iter().any(|name| code.contains(name)) { 1 } else { 4 };
            let is_near = |point: &&&Point| (point.line..point.line + lines).contains(&number);
            let is_met = met.iter().filter(is_near).any(|point| point.file == file);
            if is_strong && !is_met && !code.starts_with("use ") {
                unmet.push(described(file, number, "any"));
            }
        }
    }
    unmet
}

/// Returns the place of a point.
pub(crate) fn place(point: &Point) -> Place {
    described(&point.file, point.line, point.half.name())
}

/// Returns the path of a source file from the root of the repository on, and its text.
fn source(file: &str) -> (String, String) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.ancestors().nth(2).expect("the package is in tests/");
    let path = package.join(file).canonicalize().expect("the source is where it was compiled");
    let text = fs::read_to_string(&path).expect("the source can be read");
    (path.strip_prefix(root).unwrap_or(&path).display().to_string(), text)
}

fn described(file: &str, line: u32, half: &'static str) -> Place {
    let (file, text) = source(file);
    let lines: Vec<&str> = text.lines().collect();
    let before = &lines[..line as usize];
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
    Place { file, function: function_name, code: lines[line as usize - 1].trim().to_owned(), half }
}
