//! `devicemesh new`: writes a small project that trains on eight processes, to begin from.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::Failure;
use crate::stdio::print;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
The project has four files and its README.md says how to build and run it; the
command prints the same lines. It trains a linear model on a mesh
(replicate=2, shard=4) of eight processes, without a GPU.

Examples:
  devicemesh new my_trainer --cmake
  devicemesh new my_trainer --python
  devicemesh new my_trainer --cargo --source ~/libdevicemesh

Exit codes:
  0  the project is there
  1  it could not be written
  2  wrong command line, or a folder of that name has files already";

/// The page that every project has.
const README: &str = include_str!("../templates/README.md");

#[derive(Args)]
#[group(required = true, multiple = false, id = "language")]
struct Language {
    /// A project in C++, which CMake builds
    #[arg(long, group = "language")]
    cmake: bool,
    /// A project in Python
    #[arg(long, group = "language")]
    python: bool,
    /// A project in Rust, which cargo builds
    #[arg(long, group = "language", requires = "source")]
    cargo: bool,
}

#[derive(Args)]
pub struct Options {
    /// The folder of the project. Its last part is the name of the program
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    language: Language,
    /// With --cargo: where libdevicemesh's sources are
    #[arg(long, value_name = "FOLDER", requires = "cargo")]
    source: Option<PathBuf>,
}

/// A kind of project.
struct Template {
    /// The files besides README.md: their names and texts.
    files: &'static [(&'static str, &'static str)],
    /// How to build and run it, a command a line.
    commands: &'static str,
    /// Where the commands find the library, in a sentence; empty where the project's files say so.
    library: &'static str,
}

const CMAKE: Template = Template {
    files: &[
        ("CMakeLists.txt", include_str!("../templates/cmake/CMakeLists.txt")),
        ("trainer.cpp", include_str!("../templates/cmake/trainer.cpp")),
        (".gitignore", "/build/\n"),
    ],
    commands: "cmake -B build && cmake --build build\ndevicemesh run -n 8 -- build/@NAME@",
    library: "CMake finds an installed library. To use a source tree after `cargo build --release`,
give the first command -Ddevicemesh_DIR=SOURCES/cmake.",
};
const CARGO: Template = Template {
    files: &[
        // A folder with a file named Cargo.toml would not be packed into the crate.
        ("Cargo.toml", include_str!("../templates/cargo/Cargo.toml.in")),
        ("src/main.rs", include_str!("../templates/cargo/main.rs")),
        (".gitignore", "/target/\n"),
    ],
    commands: "cargo build --release\ndevicemesh run -n 8 -- target/release/@NAME@",
    library: "",
};
const PYTHON: Template = Template {
    files: &[
        ("train.py", include_str!("../templates/python/train.py")),
        ("requirements.txt", include_str!("../templates/python/requirements.txt")),
        (".gitignore", "__pycache__/\n.venv/\n"),
    ],
    commands: "pip install -r requirements.txt\npython -m devicemesh run -n 8 -- python train.py",
    library: "To use a source tree, begin with `pip install SOURCES/bindings/python`. Debian's and
Ubuntu's own Python needs a virtual environment.",
};

/// Names that CMake's targets or cargo's folders have.
const RESERVED: [&str; 10] =
    ["all", "build", "clean", "deps", "examples", "help", "incremental", "install", "package", "test"];

/// Returns the name of the program, which must suit cargo and CMake as well.
fn name_of(folder: &Path) -> Result<&str, Failure> {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_letter = |c: char| c.is_ascii_alphabetic();
    let suits =
        name.starts_with(is_letter) && name.chars().all(|c| is_letter(c) || c.is_ascii_digit() || "_-".contains(c));
    if suits && !RESERVED.contains(&name) {
        return Ok(name);
    }
    Err(Failure::new(
        2,
        format!(
            "the name of a program has letters, digits, _ and - and begins with a letter, and is no word of cmake or cargo, so \"{}\" cannot be one",
            folder.display()
        ),
    ))
}

/// Returns the absolute path of libdevicemesh's sources.
fn source_of(folder: &Path) -> Result<String, Failure> {
    let manifest = folder.join("Cargo.toml");
    let text = fs::read_to_string(&manifest)
        .map_err(|reason| Failure::new(2, format!("--source: cannot read {}: {reason}", manifest.display())))?;
    if !text.contains("\nname = \"devicemesh\"\n") {
        return Err(Failure::new(2, format!("--source: {} is not libdevicemesh's", manifest.display())));
    }
    let path = fs::canonicalize(folder).map_err(|reason| Failure::new(2, format!("--source: {reason}")))?;
    Ok(path.display().to_string().replace('\\', "\\\\").replace('"', "\\\""))
}

/// Writes the project, and prints how to build and run it.
pub fn new(options: &Options) -> Result<u8, Failure> {
    let name = name_of(&options.folder)?;
    let template = match &options.language {
        Language { cmake: true, .. } => CMAKE,
        Language { python: true, .. } => PYTHON,
        _ => CARGO,
    };
    let source = options.source.as_deref().map(source_of).transpose()?.unwrap_or_default();
    let minor = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));
    let library = match template.library {
        "" => String::new(),
        library => format!("\n{library}\n"),
    };
    let filled = |text: &str| {
        let text = text.replace("@LIBRARY@", &library).replace("@COMMANDS@", template.commands).replace("@NAME@", name);
        text.replace("@MINOR@", minor).replace("@SOURCE@", &source)
    };
    let folder = options.folder.display();
    let failed = |what: &str, reason: std::io::Error| Failure::new(1, format!("{what}: {reason}"));
    if fs::read_dir(&options.folder).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Failure::new(2, format!("{folder} has files already; choose a folder that is empty or not there")));
    }
    fs::create_dir_all(&options.folder).map_err(|reason| failed(&format!("making {folder}"), reason))?;
    for (file, text) in template.files.iter().chain(&[("README.md", README)]) {
        let path = options.folder.join(file);
        let what = format!("writing {}", path.display());
        path.parent().map_or(Ok(()), fs::create_dir_all).map_err(|reason| failed(&what, reason))?;
        fs::write(&path, filled(text)).map_err(|reason| failed(&what, reason))?;
    }
    let commands = filled(template.commands).replace('\n', "\n  ");
    print(format!("{folder} is there. Build and run it:\n\n  cd {folder}\n  {commands}\n{library}"))?;
    Ok(0)
}
