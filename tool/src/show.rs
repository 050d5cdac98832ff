//! `devicemesh show`: a mesh as a table and a grid in the terminal, or as a picture. Needs no device and no other rank.

mod arguments;
mod blocks;
mod grid;
mod html;
mod json;
mod outline;
mod panel;
mod svg;
mod text;
mod view;

use std::io;
use std::path::PathBuf;

use clap::Args;

use self::arguments::{HostSizes, Operations, Ranks, Sizes, Weights};
use self::view::{Axis, MAX_DRAWN, View, wrong};
use crate::failure::Failure;
use crate::stdio::print;
use crate::style::{Style, When};

pub use self::arguments::Names;

/// Up to so many ranks, each dimension has a picture of its own where none is named.
const PANEL_EACH: usize = 64;

/// What `--help` and the manual page end with.
pub const HELP: &str = "\
Examples:
  devicemesh show 2,2,2 dp,cp,tp --rank 3 --hosts 2x4
  devicemesh show 2,2,2 dp,cp,tp --flatten dp,cp=dpcp --slice dpcp,tp --svg -o mesh.svg

Exit codes:
  0  shown
  2  wrong command line, or what does not fit together in it
  1  the output cannot be written";

#[derive(Args)]
pub struct Options {
    /// The sizes of the dimensions, as 2,2,2
    #[arg(value_name = "SIZES")]
    pub sizes: Sizes,
    /// Their names, as dp,cp,tp [default: dim_0,dim_1,...]
    #[arg(value_name = "NAMES")]
    pub names: Option<Names>,
    /// The rank to mark, whose views the operations give
    #[arg(long, value_name = "RANK")]
    pub rank: Option<usize>,
    /// World ranks, row-major, instead of 0 .. n-1
    #[arg(long, value_name = "RANKS", conflicts_with = "plan")]
    pub ranks: Option<Ranks>,
    #[command(flatten)]
    pub operations: Operations,
    /// Where the ranks run: 2x4 is two hosts of four ranks, host by host
    #[arg(long, value_name = "HOSTSxRANKS")]
    pub hosts: Option<HostSizes>,
    /// The ranks are dealt out to the hosts in turn
    #[arg(long, requires = "hosts")]
    pub cyclic: bool,
    /// Place the ranks as dm_plan_ranks does for these hosts
    #[arg(long, requires = "hosts")]
    pub plan: bool,
    /// For --plan, how much a rank exchanges along each dimension [default: later ones more]
    #[arg(long, value_name = "WEIGHTS", requires = "plan")]
    pub traffic: Option<Weights>,
    /// The device type, which the mesh's text and hash contain
    #[arg(long, value_name = "TYPE", default_value = "cuda", value_parser = arguments::name)]
    pub device_type: String,
    /// Colour the ranks by the groups of these dimensions; in pictures each has one of its own
    #[arg(long, value_name = "NAMES")]
    pub color_by: Option<Names>,
    /// A picture, as SVG
    #[arg(long, group = "form")]
    pub svg: bool,
    /// A page with the picture and the table
    #[arg(long, group = "form")]
    pub html: bool,
    /// One line of JSON
    #[arg(long, group = "form")]
    pub json: bool,
    /// Colours in the terminal; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub color: When,
    /// Write to this file instead of to standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Shows the mesh and gives the exit code.
pub fn show(options: &Options) -> Result<u8, Failure> {
    let view = View::new(options)?;
    let axes = coloured(&view, options)?;
    let out = if options.json {
        json::json(&view)
    } else if options.svg || options.html {
        let size = view.grid.ranks.len();
        if size > MAX_DRAWN {
            return Err(wrong(format!(
                "a picture shows up to {MAX_DRAWN} ranks, this view has {size}: take fewer dimensions with --slice, or leave --svg and --html out for a summary"
            )));
        }
        match options.svg {
            true => svg::svg(&view, &axes),
            false => html::html(&view, &axes),
        }
    } else {
        // A file is no terminal.
        let when = if options.output.is_some() && options.color == When::Auto { When::Never } else { options.color };
        text::text(&view, axes.last().copied(), Style::new(when, &io::stdout()))
    };
    write(options, &out)?;
    Ok(0)
}

/// The dimensions whose groups have colours. Unless they are named: every one with several ranks while the mesh is small, else the last.
fn coloured<'a>(view: &'a View, options: &Options) -> Result<Vec<&'a Axis>, Failure> {
    let Some(names) = &options.color_by else {
        let several: Vec<&Axis> = view.axes.iter().filter(|axis| axis.size > 1).collect();
        let text = !options.svg && !options.html;
        return Ok(match several.iter().rposition(|axis| view.grid.names.contains(&axis.name)) {
            Some(last) if text || view.grid.ranks.len() > PANEL_EACH => vec![several[last]],
            _ => several,
        });
    };
    let find = |name: &String| {
        view.axes.iter().find(|axis| axis.name == *name).ok_or_else(|| {
            let known: Vec<&str> = view.axes.iter().map(|axis| axis.name.as_str()).collect();
            wrong(format!("--color-by {name}: the view has the dimensions ({})", known.join(", ")))
        })
    };
    names.0.iter().map(find).collect()
}

fn write(options: &Options, text: &str) -> Result<(), Failure> {
    if let Some(file) = &options.output {
        return std::fs::write(file, text)
            .map_err(|error| Failure::new(1, format!("cannot write {}: {error}", file.display())));
    }
    print(text)
}
