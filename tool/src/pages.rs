//! `devicemesh completions` and `devicemesh man`. Both are made from clap's description of the
//! command line.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::failure::Failure;
use crate::stdio::print;
use crate::terminal::{self, hanging};

/// The width of the commands in the examples of a manual page. man(1) indents them by 7 cells.
const EXAMPLE: usize = 72;

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

/// The command line with a help that fits the terminal.
pub fn fitted(line: Command) -> Command {
    let width = terminal::width_of_help();
    let line = line.term_width(width);
    let end = line.get_after_long_help().map(|end| end.to_string());
    let line = if let Some(end) = end { line.after_long_help(fit(&end, width)) } else { line };
    line.mut_subcommands(fitted)
}

/// A part at the end of a long help, for example "Exit codes:" with the lines below it.
struct Section<'a> {
    heading: &'a str,
    lines: Vec<Line<'a>>,
}

/// A line of a [`Section`].
enum Line<'a> {
    /// A label and its text, with two spaces or more between them: "124  --timeout passed".
    Labelled(&'a str, &'a str),
    /// A command of the examples.
    Command(&'a str),
    /// Any other text.
    Text(&'a str),
}

/// The sections of the end of a long help.
fn sections(end: &str) -> impl Iterator<Item = Section<'_>> {
    end.split("\n\n").filter(|part| !part.is_empty()).map(|part| {
        let (heading, lines) = part.split_once(":\n").unwrap_or(("Notes", part));
        let line = |line| match str::trim(line) {
            text if text.starts_with('#') => Line::Text(text),
            text if heading == "Examples" => Line::Command(text),
            text => text.split_once("  ").map_or(Line::Text(text), |(label, text)| Line::Labelled(label, text.trim())),
        };
        Section { heading, lines: lines.lines().map(line).collect() }
    })
}

/// The end of a long help in lines of at most `width` cells. A text goes on below its beginning. A
/// command goes on after a backslash, so that it can be copied.
fn fit(end: &str, width: usize) -> String {
    let section = |Section { heading, lines }: Section<'_>| {
        let labels = lines.iter().map(|line| if let Line::Labelled(label, _) = line { label.len() } else { 0 });
        let label_width = labels.max().unwrap_or(0);
        let line = |line: &Line<'_>| match line {
            Line::Labelled(label, text) => {
                let column = 2 + label_width + 2;
                format!("  {label:<label_width$}  {}\n", hanging(text, column, column, Some(width)))
            }
            Line::Command(text) => format!("  {}\n", command(text, 2, width)),
            Line::Text(text) => format!("  {}\n", hanging(text, 2, 2, Some(width))),
        };
        format!("{heading}:\n{}", lines.iter().map(line).collect::<String>())
    };
    sections(end).map(section).collect::<Vec<_>>().join("\n")
}

/// A command in lines of at most `width` cells, of which the first begins after `first` cells. An
/// option and the word after it stay in one line.
fn command(text: &str, first: usize, width: usize) -> String {
    const GLUE: char = '\u{a0}';
    let mut glued = String::new();
    let mut words = text.split(' ').peekable();
    while let Some(word) = words.next() {
        let is_pair = word.starts_with('-') && words.peek().is_some_and(|next| !next.starts_with('-'));
        glued += word;
        glued.push(if is_pair { GLUE } else { ' ' });
    }
    let lines = hanging(glued.trim_end(), first, first + 4, Some(width - 2));
    lines.replace('\n', " \\\n").replace(GLUE, " ")
}

/// The manual page of a command. The parts at the end of the long help ("Exit codes: ...") become
/// sections.
fn page(command: Command) -> Result<Vec<u8>, Failure> {
    let after = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let subcommands = command.has_subcommands();
    let title = command.get_display_name().unwrap_or(command.get_name()).replace('-', "\\-");
    let synopsis = synopsis(&command);
    let man = Man::new(command);
    let mut out = Vec::new();
    let mut write = || -> io::Result<()> {
        // The footer names the tool and its version. clap_mangen leaves out the empty date, and
        // then the version stands in the place of the date.
        writeln!(out, ".TH \"{title}\" 1 \"\" \"devicemesh {}\" \"libdevicemesh\"", env!("CARGO_PKG_VERSION"))?;
        // No hyphenation (.nh) and no justified lines (.ad l), so that names of options stay whole.
        writeln!(out, ".nh\n.ad l")?;
        man.render_name_section(&mut out)?;
        writeln!(out, ".SH SYNOPSIS\n{synopsis}")?;
        man.render_description_section(&mut out)?;
        man.render_options_section(&mut out)?;
        if subcommands {
            man.render_subcommands_section(&mut out)?;
        }
        sections(&after).try_for_each(|part| write!(out, "{}", roff_section(&part)))
    };
    write().map_err(|error| Failure::new(1, error.to_string()))?;
    Ok(out)
}

/// The synopsis of a manual page, with the value of each option.
fn synopsis(command: &Command) -> String {
    let mut words = vec![format!("\\fB{}\\fR", roff(command.get_bin_name().unwrap_or(command.get_name())))];
    let values = |argument: &Arg| {
        let names = argument.get_value_names().filter(|_| argument.get_action().takes_values());
        names.into_iter().flatten().map(|name| format!("\\fI{}\\fR", roff(name))).collect::<Vec<_>>()
    };
    for option in command.get_arguments().filter(|argument| !argument.is_hide_set() && !argument.is_positional()) {
        let short = option.get_short().map(|short| format!("\\fB\\-{short}\\fR"));
        let long = option.get_long().map(|long| format!("\\fB\\-\\-{}\\fR", roff(long)));
        let names = short.into_iter().chain(long).collect::<Vec<_>>().join("|");
        // A line is not broken between an option and its value.
        let word = [vec![names], values(option)].concat().join("\\ ");
        let again = if matches!(option.get_action(), ArgAction::Append) { "..." } else { "" };
        words.push(format!("[{word}]{again}"));
    }
    for positional in command.get_positionals() {
        let name = values(positional).join(" ");
        words.push(match (positional.is_required_set(), positional.is_trailing_var_arg_set()) {
            (true, true) => format!("[\\fB\\-\\-\\fR] {name} [\\fIARGUMENT\\fR]..."),
            (true, false) => name,
            (false, _) => format!("[{name}]"),
        });
    }
    if command.has_subcommands() {
        words.push("\\fISUBCOMMAND\\fR".to_owned());
    }
    words.join("\n")
}

/// A section of a manual page.
fn roff_section(Section { heading, lines }: &Section<'_>) -> String {
    let is_examples = lines.iter().any(|line| matches!(line, Line::Command(_)));
    let line = |line: &Line<'_>| match line {
        Line::Labelled(label, text) => format!(".TP\n\\fB{}\\fR\n{}\n", roff(label), roff(text)),
        Line::Command(text) => format!("{}\n", roff(&command(text, 0, EXAMPLE))),
        Line::Text(text) => format!("{}\n", roff(text)),
    };
    let lines: String = lines.iter().map(line).collect();
    let (begin, end) = if is_examples { (".nf\n", ".fi\n") } else { ("", "") };
    format!(".SH \"{}\"\n{begin}{lines}{end}", heading.to_uppercase())
}

/// Returns the text with the characters escaped that mean something in roff.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    // roff takes a line that begins with a dot or a quote for a request.
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::{fit, roff_section, sections};

    const END: &str = "\
Examples:
  # two hosts
  run --hosts alpha,beta -- ./train

Exit codes:
  0    all is well here and everywhere
  124  too late

The ranks get:
  RANK, WORLD_SIZE";

    #[test]
    fn the_end_of_a_help_fits_the_terminal() {
        assert_eq!(fit(END, 100), format!("{END}\n"));
        let narrow = "\
Examples:
  # two hosts
  run --hosts alpha,beta \\
      -- ./train

Exit codes:
  0    all is well here and
       everywhere
  124  too late

The ranks get:
  RANK, WORLD_SIZE
";
        assert_eq!(fit(END, 30), narrow);
    }

    #[test]
    fn the_end_of_a_help_is_part_of_the_manual_page() {
        let page: String = sections(END).map(|part| roff_section(&part)).collect();
        assert_eq!(
            page,
            ".SH \"EXAMPLES\"\n.nf\n# two hosts\nrun \\-\\-hosts alpha,beta \\-\\- ./train\n.fi\n\
             .SH \"EXIT CODES\"\n.TP\n\\fB0\\fR\nall is well here and everywhere\n.TP\n\\fB124\\fR\ntoo late\n\
             .SH \"THE RANKS GET\"\nRANK, WORLD_SIZE\n"
        );
    }
}
