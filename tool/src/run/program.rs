//! Finds the program of the ranks, and explains why an existing program cannot be started: its
//! interpreter or loader is missing, or it is a script that is not in PATH or may not be executed.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::identity::{shell_line, shell_word};

/// The options by which mpirun, mpiexec and srun set the number of ranks of a program.
const COUNTS: [&str; 5] = ["-n", "-np", "--np", "-c", "-N"];
/// How many bytes of a program are read for its first line or for its ELF headers.
const HEAD: u64 = 4096;
/// `p_type` of the program header that names the ELF loader (elf(5)).
const PT_INTERP: u32 = 3;

/// Returns the program that the ranks run. The name `devicemesh` means this tool where PATH has no
/// program of that name, because the tool need not be in PATH on the other hosts of a job.
pub fn resolve(program: &OsStr) -> OsString {
    let own = std::env::current_exe().ok().filter(|own| own.file_name() == Some(program));
    match own {
        Some(own) if find(program).is_none() => own.into(),
        _ => program.to_owned(),
    }
}

/// Whether the program's file is empty. exec would run it with /bin/sh, as every file without a
/// format of its own (execvp(3)), so the ranks of a program that was not copied whole would
/// succeed.
pub fn is_empty(program: &OsStr) -> bool {
    let may_run = |path: &PathBuf| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    let Some(path) = candidates(program).find(may_run) else { return false };
    // Some file systems give a file that has bytes the length 0.
    let is_read_as_empty =
        || File::open(&path).and_then(|mut file| file.read(&mut [0])).map_or(true, |count| count == 0);
    path.metadata().is_ok_and(|file| file.len() == 0) && is_read_as_empty()
}

/// Returns what is wrong with the program and its arguments, where a user has written them as for
/// another launcher.
pub fn mistake(command: &[OsString]) -> Option<String> {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    let first = words.first()?;
    if first.as_ref() == "-m" {
        let line = shell_line(&command[1..]);
        return Some(format!("-m is an option of Python, and the program is missing: write -- python3 -m {line}"));
    }
    if first.starts_with('-') {
        let first = shell_word(first);
        return Some(format!("{first} follows --, where the program begins: write the options before --"));
    }
    // expr and other programs take a colon as an argument, but not with a number of ranks behind
    // it.
    let begins_another = |next: &[Cow<str>]| match next {
        [colon, option, number] => colon == ":" && COUNTS.contains(&&**option) && number.parse::<u32>().is_ok(),
        _ => false,
    };
    let at = words.windows(3).position(begins_another)?;
    let (colon, option, number) = (&words[at], &words[at + 1], &words[at + 2]);
    Some(format!(
        "all ranks run one program, and `{colon} {option} {number}` begins another one: start a script that chooses by rank, such as -- sh -c 'if [ $RANK -lt N ]; then exec FIRST; else exec SECOND; fi'"
    ))
}

/// Why a program could not be started, and what to do. `None` where the error says it all.
pub fn why(program: &OsStr, error: &io::Error) -> Option<String> {
    let name = program.to_string_lossy();
    let has_folder = name.contains('/');
    match error.kind() {
        ErrorKind::NotFound if name.is_empty() => {
            Some("the program's name is empty; if it comes from a shell variable, set that".to_owned())
        }
        ErrorKind::NotFound if name.contains(' ') && find(program).is_none() => {
            Some(format!("there is no such program; a line for the shell is -- sh -c {}", shell_word(&name)))
        }
        ErrorKind::NotFound if !has_folder && find(program).is_none() => {
            let here = format!("./{name}");
            let more = match Path::new(&here) {
                path if path.is_file() => format!("; {here} is here: {}", command_for(&here)),
                path if path.is_dir() => format!(", and {here} is a folder, not a program"),
                _ if name.parse::<u32>().is_ok() => format!("; -n {name} is the number of ranks"),
                _ if name == "python" && find(OsStr::new("python3")).is_some() => ", but python3 is".to_owned(),
                _ if name.contains('=') => format!("; to set a variable, write -- env {name} PROGRAM"),
                _ => String::new(),
            };
            Some(format!("{} is not in PATH{more}", shell_word(&name)))
        }
        ErrorKind::NotFound if has_folder && Path::new(program).is_relative() && !Path::new(program).exists() => {
            let folder = std::env::current_dir().ok()?;
            Some(format!("there is no such file in {}", folder.display()))
        }
        ErrorKind::PermissionDenied if has_folder && Path::new(program).is_dir() => {
            Some("it is a folder, not a program".to_owned())
        }
        ErrorKind::PermissionDenied if has_folder && Path::new(program).is_file() => {
            let command = command_for(&name);
            Some(format!("it may not be executed ({error}): {command}"))
        }
        _ => missing(program, error),
    }
}

/// The command line for a file, after its kind.
fn command_for(path: &str) -> String {
    let word = shell_word(path);
    let may_run = access(path, Access::EXEC_OK).is_ok();
    match Path::new(path).extension().and_then(OsStr::to_str) {
        Some("py") => format!("-- python3 {}", word.strip_prefix("./").unwrap_or(&word)),
        _ if may_run => format!("-- {word}"),
        Some("sh") => format!("-- sh {}", word.strip_prefix("./").unwrap_or(&word)),
        _ => format!("chmod +x {word}"),
    }
}

/// Returns why exec found no file although the program exists. The kernel's error is that of a
/// missing program, because the interpreter or the loader is missing. `None` for other errors, and
/// where the program is missing.
fn missing(program: &OsStr, error: &io::Error) -> Option<String> {
    let path = find(program).filter(|_| error.kind() == ErrorKind::NotFound)?;
    let mut head = Vec::new();
    let file = File::open(&path).ok()?;
    (&file).take(HEAD).read_to_end(&mut head).ok()?;
    let (what, needed) = match interpreter(&head) {
        Some(interpreter) => ("the interpreter that its first line (#!) names", interpreter),
        None => ("its ELF loader", loader(&head, &file)?),
    };
    // The kernel takes a name without a slash from the current folder too.
    if Path::new(&needed).exists() {
        return None;
    }
    let advice = match needed.as_bytes() {
        [.., b'\r'] => "; the line ends with a carriage return, as on Windows: remove it, for example with dos2unix",
        _ if what.starts_with("its ELF") => {
            "; the program was built for another C library or another architecture, or runs in a container without it"
        }
        _ => "",
    };
    Some(format!("{what} is missing: {}{advice}", needed.to_string_lossy()))
}

/// The file of a program, found as execvp(3) finds it.
fn find(program: &OsStr) -> Option<PathBuf> {
    candidates(program).find(|path| path.is_file())
}

/// The paths at which execvp(3) looks for a program, in that order.
fn candidates(program: &OsStr) -> impl Iterator<Item = PathBuf> {
    let folders = match program.as_bytes().contains(&b'/') {
        // Joined to an empty path, a path stays as it is.
        true => vec![PathBuf::new()],
        false => std::env::var_os("PATH").map_or_else(Vec::new, |folders| std::env::split_paths(&folders).collect()),
    };
    folders.into_iter().map(move |folder| folder.join(program))
}

/// The interpreter of a script, from its first line.
fn interpreter(head: &[u8]) -> Option<OsString> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let name = line.split(is_blank).find(|word| !word.is_empty())?;
    Some(OsString::from_vec(name.to_vec()))
}

/// The loader that an ELF file of this machine's byte order names.
fn loader(head: &[u8], file: &File) -> Option<OsString> {
    let wide = match head.strip_prefix(b"\x7fELF")?.first()? {
        1 => false,
        2 => true,
        _ => return None,
    };
    let short = |at: usize| Some(u16::from_ne_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_ne_bytes(head.get(at..at + 4)?.try_into().ok()?));
    // A number as wide as this file's addresses.
    let address = |at: usize| match wide {
        true => Some(u64::from_ne_bytes(head.get(at..at + 8)?.try_into().ok()?)),
        false => word(at).map(u64::from),
    };
    let (table, size, count) = match wide {
        true => (address(32)?, short(54)?, short(56)?),
        false => (address(28)?, short(42)?, short(44)?),
    };
    for header in 0..usize::from(count) {
        let at = usize::try_from(table).ok()?.checked_add(header * usize::from(size))?;
        if at > head.len() || word(at)? != PT_INTERP {
            continue;
        }
        let (offset, length) =
            if wide { (address(at + 8)?, address(at + 32)?) } else { (address(at + 4)?, address(at + 16)?) };
        let mut name = vec![0; usize::try_from(length.min(HEAD)).ok()?];
        file.read_exact_at(&mut name, offset).ok()?;
        return Some(OsString::from_vec(name.into_iter().take_while(|byte| *byte != 0).collect()));
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::{interpreter, loader};

    #[test]
    fn scripts_name_their_interpreter() {
        for (text, name) in [
            (&b"#!/bin/sh\necho"[..], Some("/bin/sh")),
            (b"#! /usr/bin/env python3\n", Some("/usr/bin/env")),
            (b"#!/bin/sh\r\necho", Some("/bin/sh\r")),
            (b"#!\n", None),
            (b"echo", None),
            (b"", None),
        ] {
            assert_eq!(interpreter(text).as_deref().and_then(|name| name.to_str()), name, "{text:?}");
        }
    }

    #[test]
    fn elf_files_name_their_loader() {
        let file = File::open("/proc/self/exe").unwrap();
        let mut head = Vec::new();
        (&file).take(super::HEAD).read_to_end(&mut head).unwrap();
        let name = loader(&head, &file).unwrap();
        assert!(std::path::Path::new(&name).exists(), "{name:?}");
        // A file that is cut off, or is no ELF file, has none.
        for length in [0, 3, 4, 5, 20, 60, 100] {
            assert_eq!(loader(&head[..length], &file), None, "{length}");
        }
    }
}
