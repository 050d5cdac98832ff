//! Finds the function and the line of code at a place in the source, so that a table of memory
//! orders needs no numbers of lines.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

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

/// The words that name a memory order.
const ORDERS: [&str; 5] = ["Relaxed", "Acquire", "Release", "AcqRel", "SeqCst"];

/// Returns the accesses and fences that no model has met, in the product's files which the source
/// in `folder` includes. Relaxed accesses count, too.
pub(crate) fn unmet(folder: &str, met: &[&Point]) -> Vec<Place> {
    let met: BTreeSet<(PathBuf, u32, u32)> =
        met.iter().map(|point| (path(&point.file), point.line, point.column)).collect();
    let mut files = BTreeSet::new();
    include(&path(folder), &mut files);
    assert!(!files.is_empty(), "{folder} includes no file of the product");
    let mut unmet = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("the source can be read");
        let is_unmet = |(line, column): &(u32, u32)| !met.contains(&(file.clone(), *line, *column));
        let lines: BTreeSet<u32> = accesses(&text).into_iter().filter(is_unmet).map(|(line, _)| line).collect();
        unmet.extend(lines.into_iter().map(|line| described(&file, line, "any")));
    }
    unmet
}

/// Adds the files that the source files in `folder` include by `#[path]`.
fn include(folder: &Path, files: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the program's source can be read") {
        let entry = entry.expect("the program's source can be read").path();
        if entry.is_dir() {
            include(&entry, files);
        } else {
            let text = fs::read_to_string(&entry).expect("the program's source can be read");
            let names = text.lines().filter_map(|line| line.trim().strip_prefix("#[path = \"")?.strip_suffix("\"]"));
            files.extend(names.map(|name| folder.join(name).canonicalize().expect("the file is where it is included")));
        }
    }
}

/// Returns the line and the column of each access and fence in a source text, as the compiler
/// counts them: where the name of the function begins. An order that is no argument of a call has
/// its own place.
fn accesses(text: &str) -> BTreeSet<(u32, u32)> {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code: Vec<&str> = product.lines().map(code).collect();
    let code = code.join("\n");
    let mut found = BTreeSet::new();
    for word in ORDERS {
        for (at, _) in code.match_indices(word) {
            let is_part = |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
            if is_part(code[..at].chars().next_back()) || is_part(code[at + word.len()..].chars().next()) {
                continue;
            }
            let start = function(&code[..at]).unwrap_or(at);
            let line = code[..start].rsplit('\n').next().unwrap_or_default();
            found.insert((1 + code[..start].matches('\n').count() as u32, 1 + line.chars().count() as u32));
        }
    }
    found
}

/// Returns a line without a comment, and nothing of a line that imports names.
fn code(line: &str) -> &str {
    let is_import = ["use ", "pub use ", "pub(crate) use "].iter().any(|start| line.starts_with(start));
    if is_import { "" } else { line.split("//").next().unwrap_or_default() }
}

/// Returns where the name of the function begins whose arguments the text ends in.
fn function(before: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, letter) in before.char_indices().rev() {
        match letter {
            ')' | ']' | '}' => depth += 1,
            '(' if depth == 0 => {
                let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
                return Some(before[..at].trim_end_matches(is_part).len());
            }
            '[' | '{' | ';' if depth == 0 => return None,
            '(' | '[' | '{' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Returns the place of a point.
pub(crate) fn place(point: &Point) -> Place {
    described(&path(&point.file), point.line, point.half.name())
}

/// Returns the whole path of a file or folder that is named from this package on.
fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file).canonicalize().expect("the source is where it was compiled")
}

fn described(path: &Path, line: u32, half: &'static str) -> Place {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the package is in tests/");
    let file = path.strip_prefix(root).unwrap_or(path).display().to_string();
    let text = fs::read_to_string(path).expect("the source can be read");
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
