//! One rank's view of a mesh: layout, names and rank map.
