//! Prints for `devicemesh run --hosts --dry-run` the commands that would reach the hosts. Nothing
//! is started and no host is reached.

use std::io;

use devicemesh::printable::printable;

use super::forward::forwarded;
use super::list::Host;
use super::plan::Plan;
use crate::failure::Failure;
use crate::labelled::{Labelled, PLAIN};
use crate::run::identity::shell_line;
use crate::run::options::{Count, Options};
use crate::stdio::print;
use crate::style::Style;
use crate::terminal;
use crate::words::count;

/// Prints what would be started on each host, and starts nothing.
pub fn show(options: &Options, hosts: Vec<Host>) -> Result<u8, Failure> {
    let plan = Plan::new(options, hosts)?;
    let stdout = io::stdout();
    let style = Style::new(options.color, &stdout);
    let mut lines = Labelled::new(style, Some(terminal::width().unwrap_or(PLAIN)));
    let mut line = |label: &str, text: &str| lines.line(label, text);
    let hosts = count(plan.hosts.len(), "host");
    let nodes = if plan.hosts.len() == 1 { "as one node" } else { "one node on each" };
    let what = format!("would start the job on {hosts}, {nodes}");
    line("dry run", &what);
    line("command", &printable(&shell_line(&options.command)));
    let folder = std::env::current_dir().map_or_else(|error| error.to_string(), |folder| folder.display().to_string());
    line("folder", &format!("{}, which every host needs", printable(&folder)));
    let port = plan.port.map_or("a port that is free there".to_owned(), |port| format!("port {port}"));
    let who = if options.meeting.service()?.is_some() { "a devicemesh store " } else { "" };
    line("store", &format!("{who}on {}, at {port}", plan.meeting));
    let mut names: Vec<String> =
        forwarded(&options.hosts.forward)?.iter().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(" ") };
    line("variables", &format!("{}, over the standard input of the commands below", printable(&names)));
    line("ranks", "devicemesh run --dry-run on a host shows its ranks, with all their variables and CPUs");
    let restart = options.restart.standing();
    if let Some(restarts) = restart.describe() {
        line("restarts", &restarts);
    }
    let spares = if restart.spares == 0 { String::new() } else { format!(" and {}", count(restart.spares, "spare")) };
    for planned in &plan.hosts {
        let ranks = match planned.host.ranks.map(Count::Ranks).or(options.ranks) {
            Some(ranks) => format!("-n {ranks}"),
            None => "one rank for each device there, else 1".to_owned(),
        };
        line(planned.host.name(), &format!("{ranks}{spares}, by {}", printable(&shell_line(&planned.command))));
    }
    print(lines.into_text())?;
    Ok(0)
}
