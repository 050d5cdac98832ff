//! `devicemesh completions` and `devicemesh man`. Both are made from clap's description of the
//! command line.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Arg, Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::failure::Failure;
use crate::stdio::print;

/// The options of `devicemesh completions`.
#[derive(Args)]
pub struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// The options of `devicemesh man`.
#[derive(Args)]
pub struct Manual {
    /// The subcommand whose page is printed; left out, the page of the tool itself
    #[arg(value_name = "SUBCOMMAND", conflicts_with = "dir")]
    subcommand: Option<String>,
    /// Write all pages into this folder, devicemesh.1, devicemesh-run.1 and so on, instead of one
    /// to standard output
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the completions for a shell.
pub fn completions(options: &Completions, mut tool: Command) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut tool, "devicemesh", &mut script);
    print(&script)?;
    Ok(0)
}

/// Prints or writes the manual pages.
pub fn manual(options: &Manual, tool: Command) -> Result<u8, Failure> {
    // clap's own `help` contains all other subcommands again, and clap has no page for it.
    let named = Arg::new("COMMAND").help("The subcommand; left out, all of them are listed");
    let help = Command::new("help").about("Print the help of the tool, or of a subcommand").disable_help_flag(true);
    let tool = tool.disable_help_subcommand(true).subcommand(help.arg(named));
    let mut tool = tool;
    tool.build();
    let commands: Vec<Command> = tool.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    let Some(folder) = &options.dir else {
        let command = match &options.subcommand {
            Some(name) => subcommand(&commands, name)?,
            None => tool,
        };
        print(page(command)?)?;
        return Ok(0);
    };
    let cannot = |path: &Path, error: io::Error| Failure::new(1, format!("cannot write {}: {error}", path.display()));
    std::fs::create_dir_all(folder).map_err(|error| cannot(folder, error))?;
    for command in commands.into_iter().chain([tool]) {
        // A command that is built has the name devicemesh-run and so on.
        let name = command.get_display_name().unwrap_or(command.get_name());
        let path = folder.join(format!("{name}.1"));
        std::fs::write(&path, page(command)?).map_err(|error| cannot(&path, error))?;
    }
    Ok(0)
}

/// The subcommand of that name.
fn subcommand(commands: &[Command], name: &str) -> Result<Command, Failure> {
    commands.iter().find(|command| command.get_name() == name).cloned().ok_or_else(|| {
        let names: Vec<&str> = commands.iter().map(Command::get_name).collect();
        Failure::new(2, format!("there is no page {name:?}; there are {}", names.join(", ")))
    })
}

/// The manual page of a command. The parts at the end of the long help ("Exit codes: ...") become
/// sections.
fn page(command: Command) -> Result<Vec<u8>, Failure> {
    let after = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let subcommands = command.has_subcommands();
    let title = command.get_display_name().unwrap_or(command.get_name()).replace('-', "\\-");
    let man = Man::new(command);
    let mut out = Vec::new();
    let mut write = || -> io::Result<()> {
        // The footer names the tool and its version. clap_mangen leaves out the empty date, and
        // then the version stands in the place of the date.
        writeln!(out, ".TH \"{title}\" 1 \"\" \"devicemesh {}\" \"libdevicemesh\"", env!("CARGO_PKG_VERSION"))?;
        man.render_name_section(&mut out)?;
        man.render_synopsis_section(&mut out)?;
        man.render_description_section(&mut out)?;
        man.render_options_section(&mut out)?;
        if subcommands {
            man.render_subcommands_section(&mut out)?;
        }
        for part in after.split("\n\n").filter(|part| !part.is_empty()) {
            let (heading, lines) = part.split_once(":\n").unwrap_or(("Notes", part));
            writeln!(out, ".SH \"{}\"\n.nf", heading.to_uppercase())?;
            for line in lines.lines() {
                let line = line.strip_prefix("  ").unwrap_or(line).replace('\\', "\\e").replace('-', "\\-");
                // roff takes a line that begins with a dot or a quote for a request.
                let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
                writeln!(out, "{guard}{line}")?;
            }
            writeln!(out, ".fi")?;
        }
        Ok(())
    };
    write().map_err(|error| Failure::new(1, error.to_string()))?;
    Ok(out)
}
