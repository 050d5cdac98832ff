//! `devicemesh show`: shows a mesh as a table and a grid in the terminal, or as a picture. It needs
//! no device and no other rank.

mod arguments;
mod blocks;
mod canvas;
mod grid;
mod hosts;
mod html;
mod json;
mod options;
mod outline;
mod panel;
mod svg;
mod text;
mod view;
mod words;

use std::io;

use self::view::{Axis, MAX_DRAWN, View, wrong};
use crate::failure::Failure;
use crate::stdio::print;
use crate::style::{Style, When};
use crate::terminal;

pub use self::arguments::Names;
pub use self::options::{HELP, Options};

/// The most ranks of a view in which each dimension has a picture of its own without being named.
const PANEL_EACH: usize = 64;

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
        // A file gets no colours by itself.
        let when = if options.output.is_some() && options.color == When::Auto { When::Never } else { options.color };
        let width = if options.output.is_some() { None } else { terminal::width() };
        text::text(&view, axes.last().copied(), Style::new(when, &io::stdout()), width)
    };
    write(options, &out)?;
    Ok(0)
}

/// The dimensions whose groups are coloured. Where the command line names none, these are all
/// dimensions with several ranks while the mesh is small, else the last of them.
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
