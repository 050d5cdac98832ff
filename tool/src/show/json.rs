//! A view as one line of JSON.

use super::view::{Axis, MAX_DRAWN, View};

/// The view. `ranks` and the ranks of the groups are left out where the view has more than 256
/// ranks.
pub fn json(view: &View) -> String {
    let listed = view.grid.ranks.len() <= MAX_DRAWN;
    let coordinate = view.chosen.map(|index| array(view.grid.place(index).iter()));
    let mut fields = vec![
        field("describe", &string(&view.describe)),
        field("hash", &string(&format!("{:#018x}", view.hash))),
        field("device_type", &string(&view.device_type)),
        field("size", &view.grid.ranks.len().to_string()),
        field("root_size", &view.root.as_ref().map_or(view.grid.ranks.len(), |root| root.ranks.len()).to_string()),
        field("rank", &view.rank.to_string()),
    ];
    fields.extend(coordinate.map(|coordinate| field("coordinate", &coordinate)));
    if let Some(hosts) = &view.hosts {
        fields.push(field("hosts", &array([hosts.sizes.hosts, hosts.sizes.each].into_iter())));
    }
    fields.extend(view.plan.as_ref().map(|plan| field("plan", &plan.report())));
    let (dims, flattened) = view.axes.split_at(view.grid.sizes.len());
    fields.push(field("dimensions", &array(dims.iter().map(|axis| dimension(view, axis, listed)))));
    fields.push(field("flattened", &array(flattened.iter().map(|axis| dimension(view, axis, listed)))));
    let names = |names: &Vec<String>| array(names.iter().map(|name| string(name)));
    fields.push(field("shared_communicators", &array(view.shared.iter().map(names))));
    if listed {
        fields.push(field("ranks", &array(view.grid.ranks.iter())));
    }
    format!("{{{}}}\n", fields.join(","))
}

fn dimension(view: &View, axis: &Axis, listed: bool) -> String {
    let layout = axis.pairs.iter().map(|(size, stride)| format!("[{size},{stride}]"));
    let mut fields = vec![
        field("name", &string(&axis.name)),
        field("size", &axis.size.to_string()),
        field("layout", &array(layout)),
        field("groups", &view.groups(axis).to_string()),
    ];
    fields.extend(view.crossing(axis).map(|crossing| field("crossing_groups", &crossing.to_string())));
    fields.extend(view.chosen_group(axis).map(|group| field("group", &array(view.members(axis, group)))));
    if listed {
        let groups = (0..view.groups(axis)).map(|group| array(view.members(axis, group)));
        fields.push(field("ranks", &array(groups)));
    }
    format!("{{{}}}", fields.join(","))
}

fn field(name: &str, value: &str) -> String {
    format!("\"{name}\":{value}")
}

fn array<T: ToString>(values: impl Iterator<Item = T>) -> String {
    format!("[{}]", values.map(|value| value.to_string()).collect::<Vec<_>>().join(","))
}

/// A text as JSON. Only quotes and backslashes are escaped, because names have no control
/// characters (arguments.rs).
fn string(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
