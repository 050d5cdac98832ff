//! Finds the NCCL wheels of Python environments, which `pip install nvidia-nccl-cu12` (PyTorch,
//! JAX) puts on a machine.
//!
//! The wheels are found by looking at folders. No interpreter is started, because a library must
//! not fork the program that uses it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The place of the library in an environment's packages.
pub(super) const INSIDE: &str = "nvidia/nccl/lib/libnccl.so.2";

/// The libraries of the wheels, those of the active environment first, and the list of folders that
/// were searched, for messages.
pub(super) fn find() -> (Vec<PathBuf>, String) {
    let prefixes = prefixes(&|name| env::var(name).ok());
    let found = prefixes.iter().flat_map(|prefix| below(prefix)).collect();
    let looked: Vec<_> = prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
    (found, looked.join(", "))
}

/// The prefixes to search: the active virtual or conda environment, the environments whose python3
/// is on the path, and the user's own packages.
fn prefixes(variable: &dyn Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name)).map(PathBuf::from).collect();
    let path = variable("PATH").unwrap_or_default();
    let with_python = env::split_paths(&path).filter(|folder| folder.join("python3").exists());
    prefixes.extend(with_python.filter_map(|folder| folder.parent().map(Path::to_owned)));
    prefixes.extend(variable("HOME").map(|home| Path::new(&home).join(".local")));
    let mut once: Vec<PathBuf> = Vec::new();
    prefixes.retain(|prefix| {
        let first = !prefix.as_os_str().is_empty() && !once.contains(prefix);
        once.push(prefix.clone());
        first
    });
    prefixes
}

/// The libraries in `prefix/lib/python3.*/site-packages`, and in `dist-packages`, as some
/// distributions call that folder. Those of the newest Python come first.
fn below(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        let entries = fs::read_dir(prefix.join(lib)).into_iter().flatten().flatten();
        let mut pythons: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        pythons.retain(|name| name.starts_with("python3"));
        pythons.sort_by_key(|name| std::cmp::Reverse((name.len(), name.clone())));
        for (python, packages) in
            pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|packages| (python, packages)))
        {
            found.push(prefix.join(lib).join(python).join(packages).join(INSIDE));
        }
    }
    found.retain(|wheel| wheel.exists());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_active_environment_comes_first_and_each_once() {
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some("/venv".to_owned()),
            "HOME" => Some("/home/someone".to_owned()),
            _ => None,
        };
        assert_eq!(prefixes(&variable), [PathBuf::from("/venv"), PathBuf::from("/home/someone/.local")]);
        let twice = |name: &str| ["VIRTUAL_ENV", "CONDA_PREFIX"].contains(&name).then(|| "/env".to_owned());
        assert_eq!(prefixes(&twice), [PathBuf::from("/env")]);
    }

    #[test]
    fn the_newest_python_of_a_prefix_comes_first() {
        let prefix = env::temp_dir().join(format!("dm-wheels-{}", std::process::id()));
        for python in ["python3.9", "python3.12"] {
            let library = prefix.join("lib").join(python).join("site-packages").join(INSIDE);
            fs::create_dir_all(library.parent().unwrap()).unwrap();
            fs::write(library, "").unwrap();
        }
        let found = below(&prefix);
        fs::remove_dir_all(&prefix).unwrap();
        let site = |python: &str| prefix.join("lib").join(python).join("site-packages").join(INSIDE);
        assert_eq!(found, [site("python3.12"), site("python3.9")]);
    }
}
