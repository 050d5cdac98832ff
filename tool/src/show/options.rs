//! The command line of `devicemesh show`.

use std::path::PathBuf;

use clap::Args;

use super::arguments::{HostSizes, Names, Operations, Ranks, Sizes, Weights, name};
use crate::style::When;

/// The end of `--help` and of the manual page.
pub const HELP: &str = "\
Examples:
  devicemesh show 2,2,2 dp,cp,tp --rank 3 --hosts 2x4
  devicemesh show 2,2,2 dp,cp,tp --flatten dp,cp=dpcp --slice dpcp,tp --svg -o mesh.svg

Exit codes:
  0  shown
  2  wrong command line, or what does not fit together in it
  1  the output cannot be written";

/// The options of `devicemesh show`. The comments of the fields are their help.
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
    /// World ranks, row-major, as 7,5,3,1 [default: 0 to n-1 in this order]
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
    /// For --plan, how much a rank exchanges along each dimension, as 1,100 [default: later ones
    /// more]
    #[arg(long, value_name = "WEIGHTS", requires = "plan")]
    pub traffic: Option<Weights>,
    /// The device type, which the mesh's text and hash contain
    #[arg(long, value_name = "TYPE", default_value = "cuda", value_parser = name)]
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
