//! Meshes as explicit lists of positions, which strides only describe. A dimension is the list of
//! all its groups. A view is a list of dimensions and the array of its positions. The model is
//! slow, and too simple to be wrong in the way that arithmetic can be.

use devicemesh::error::Status;

/// A dimension. Every position of the root is in one of its groups, at its coordinate.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    pub name: String,
    /// The groups, ordered by their first positions.
    pub groups: Vec<Vec<usize>>,
    /// For each position, its group and its coordinate there.
    places: Vec<(usize, usize)>,
}

impl Axis {
    fn new(name: &str, mut groups: Vec<Vec<usize>>) -> Axis {
        groups.sort();
        groups.dedup();
        let mut places = vec![(usize::MAX, 0); groups.iter().map(Vec::len).sum()];
        for (at, group) in groups.iter().enumerate() {
            for (coordinate, position) in group.iter().enumerate() {
                assert_eq!(places[*position].0, usize::MAX, "position {position} is in two groups of {name}");
                places[*position] = (at, coordinate);
            }
        }
        Axis { name: name.to_owned(), groups, places }
    }

    pub fn size(&self) -> usize {
        self.groups[0].len()
    }

    /// Returns the group that holds a position.
    pub fn group(&self, position: usize) -> &[usize] {
        &self.groups[self.places[position].0]
    }

    pub fn coordinate(&self, position: usize) -> usize {
        self.places[position].1
    }

    fn same_walk(&self, other: &Axis) -> bool {
        self.groups == other.groups
    }

    /// Returns the (size, stride) pairs of the walk, the most significant first; `None` where no
    /// list of strides describes the walk.
    pub fn pairs(&self) -> Option<Vec<(usize, usize)>> {
        let offsets = |group: &[usize]| group.iter().map(|at| at.wrapping_sub(group[0])).collect::<Vec<_>>();
        let walk = offsets(&self.groups[0]);
        if self.groups.iter().any(|group| offsets(group) != walk) {
            return None;
        }
        let (mut walk, mut pairs) = (walk, Vec::new());
        while walk.len() > 1 {
            // The longest run of equal steps is the fastest pair, and the rest must repeat it.
            let stride = walk[1];
            let run = (0..walk.len()).take_while(|at| walk[*at] == at.wrapping_mul(stride)).count();
            if walk.len() % run != 0 {
                return None;
            }
            let repeats = |at: usize| walk[at] == walk[at / run * run].wrapping_add(at % run * stride);
            if !(0..walk.len()).all(repeats) {
                return None;
            }
            pairs.insert(0, (run, stride));
            walk = walk.into_iter().step_by(run).collect();
        }
        Some(pairs)
    }

    /// Reshapes each group, row-major. Returns one dimension for each of the sizes.
    fn split(&self, sizes: &[usize], names: &[&str]) -> Vec<Axis> {
        let part = |index: usize| {
            let inner: usize = sizes[index + 1..].iter().product();
            let fibre = |group: &[usize], at: usize| {
                let start = at - at / inner % sizes[index] * inner;
                (0..sizes[index]).map(|step| group[start + step * inner]).collect::<Vec<_>>()
            };
            let groups = self.groups.iter().flat_map(|group| (0..group.len()).map(move |at| fibre(group, at)));
            Axis::new(names[index], groups.collect())
        };
        (0..sizes.len()).map(part).collect()
    }
}

/// The status with which a call is refused.
pub type Refused = Status;

/// A view of one rank: the array of its positions, row-major over its axes.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    pub axes: Vec<Axis>,
    pub positions: Vec<usize>,
}

/// A root mesh as one rank sees it.
#[derive(Debug, Clone)]
pub struct Root {
    pub size: usize,
    pub axes: Vec<Axis>,
    /// The world rank of each position.
    pub ranks: Vec<i32>,
    /// This rank's position; `None` where the rank is outside.
    pub position: Option<usize>,
    /// The flattened dimensions of this root that are known by name.
    pub known: Vec<Axis>,
    /// The dimensions that reshape made.
    pub reshaped: Vec<Axis>,
    pub inherited: Vec<Axis>,
    /// In a range: the positions of the outer root that it has, and the axis that was cut there.
    pub range: Option<(Vec<usize>, Axis)>,
}

impl View {
    pub fn names(&self) -> Vec<&str> {
        self.axes.iter().map(|axis| axis.name.as_str()).collect()
    }

    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(Axis::size).collect()
    }

    /// Returns the coordinates of the element at a row-major index.
    pub fn coordinate(&self, mut index: usize) -> Vec<usize> {
        let mut coordinate = vec![0; self.axes.len()];
        for (at, axis) in self.axes.iter().enumerate().rev() {
            coordinate[at] = index % axis.size();
            index /= axis.size();
        }
        coordinate
    }
}

impl Root {
    pub fn new(shape: &[usize], names: &[&str], ranks: Vec<i32>, rank: i32) -> Root {
        let size = shape.iter().product();
        let whole = Axis::new("", vec![(0..size).collect()]);
        let position = ranks.iter().position(|known| *known == rank);
        Root {
            size,
            axes: whole.split(shape, names),
            ranks,
            position,
            known: Vec::new(),
            reshaped: Vec::new(),
            inherited: Vec::new(),
            range: None,
        }
    }

    pub fn view(&self) -> View {
        View { axes: self.axes.clone(), positions: (0..self.size).collect() }
    }

    pub fn is_member(&self, view: &View) -> bool {
        self.position.is_some_and(|position| view.positions.contains(&position))
    }

    pub fn ranks_of(&self, positions: &[usize]) -> Vec<i32> {
        positions.iter().map(|position| self.ranks[*position]).collect()
    }

    /// Returns all flattened dimensions that are known by name.
    fn flat(&self) -> impl Iterator<Item = &Axis> {
        self.known.iter().chain(&self.inherited)
    }

    /// Takes over flattened dimensions of the root of which this root is a range: those that stay
    /// at one index of the axis that was cut, and whose names mean nothing else in this root.
    pub fn inherit(&mut self, outer: &Root) {
        let Some((positions, cut)) = &self.range else { return };
        let stays = |axis: &&Axis| {
            let same = |group: &Vec<usize>| group.iter().all(|at| cut.coordinate(*at) == cut.coordinate(group[0]));
            axis.groups.iter().all(same)
        };
        let own = |axis: &Axis| {
            let mut own = self.known.iter().chain(&self.reshaped).chain(&self.axes);
            own.any(|own| own.name == axis.name && !own.same_walk(axis))
        };
        let inner = outer.flat().filter(stays).map(|axis| renumbered(axis, positions));
        self.inherited = inner.filter(|axis| !own(axis)).collect();
    }

    /// Returns the array over these axes that holds a position. It goes along each axis in turn to
    /// every coordinate.
    fn copy(&self, axes: &[Axis], from: usize) -> Vec<usize> {
        axes.iter().fold(vec![from], |array, axis| {
            array.iter().flat_map(|position| axis.group(*position).iter().copied()).collect()
        })
    }

    /// Whether these axes make arrays: each rank is once in its own array, and at one place of one
    /// array for every rank in it.
    fn consistent(&self, axes: &[Axis]) -> bool {
        (0..self.size).all(|from| {
            let array = self.copy(axes, from);
            let mut sorted = array.clone();
            sorted.sort_unstable();
            sorted.dedup();
            sorted.len() == array.len() && array.iter().all(|other| self.copy(axes, *other) == array)
        })
    }

    /// Returns a dimension of the view, or a flattened one whose groups lie within the view, in
    /// whichever of its copies.
    fn named(&self, view: &View, name: &str) -> Result<Axis, Refused> {
        let holds = |axis: &&Axis| {
            (0..self.size).all(|from| {
                let copy = self.copy(&view.axes, from);
                copy.iter().all(|position| axis.group(*position).iter().all(|other| copy.contains(other)))
            })
        };
        let mine = view.axes.iter().find(|axis| axis.name == name);
        let known = || self.flat().filter(|axis| axis.name == name).find(holds);
        mine.or_else(known).cloned().ok_or(Status::NotFound)
    }

    fn picked(&self, view: &View, names: &[&str]) -> Result<Vec<Axis>, Refused> {
        let axes = names.iter().map(|name| self.named(view, name)).collect::<Result<Vec<_>, _>>()?;
        if !are_names(names) || !self.consistent(&axes) {
            return Err(Status::InvalidArgument);
        }
        Ok(axes)
    }

    pub fn slice(&self, view: &View, names: &[&str]) -> Result<View, Refused> {
        let axes = self.picked(view, names)?;
        let size: usize = axes.iter().map(Axis::size).product();
        let from = match self.position.filter(|_| self.is_member(view)) {
            Some(position) => position,
            // A rank outside can name all of the ranks, but no part of them is its own.
            None if size == view.positions.len() => view.positions[0],
            None => return Err(Status::NotMember),
        };
        Ok(View { positions: self.copy(&axes, from), axes })
    }

    pub fn flatten(&mut self, view: &View, name: Option<&str>) -> Result<View, Refused> {
        let name = name.map_or_else(|| view.names().join("_"), str::to_owned);
        if name.is_empty() {
            return Err(Status::InvalidArgument);
        }
        if view.axes.len() == 1 && view.axes[0].name == name {
            return Ok(view.clone());
        }
        let flat = Axis::new(&name, (0..self.size).map(|from| self.copy(&view.axes, from)).collect());
        let taken = |axis: &Axis| axis.name == name && !axis.same_walk(&flat);
        if self.axes.iter().any(|axis| axis.name == name)
            || self.flat().chain(&view.axes).chain(&self.reshaped).any(taken)
        {
            return Err(Status::InvalidArgument);
        }
        if !self.flat().any(|known| *known == flat) {
            self.known.push(flat.clone());
        }
        Ok(View { axes: vec![flat], positions: view.positions.clone() })
    }

    pub fn unflatten(&self, view: &View, dim: &str, sizes: &[usize], names: &[&str]) -> Result<View, Refused> {
        let at = view.axes.iter().position(|axis| axis.name == dim).ok_or(Status::NotFound)?;
        let product = sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        if product != Some(view.axes[at].size()) {
            return Err(Status::InvalidArgument);
        }
        let parts = view.axes[at].split(sizes, names);
        // Arrays would not need this refusal: strides cannot describe the parts.
        if parts.iter().any(|part| part.pairs().is_none()) {
            return Err(Status::InvalidArgument);
        }
        let mut axes = view.axes.clone();
        axes.splice(at..=at, parts);
        let split = View { axes, positions: view.positions.clone() };
        if are_names(&split.names()) { Ok(split) } else { Err(Status::InvalidArgument) }
    }

    pub fn reshape(&mut self, view: &View, sizes: &[usize], names: &[&str]) -> Result<View, Refused> {
        let product = sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        if product != Some(view.positions.len()) || !are_names(names) {
            return Err(Status::InvalidArgument);
        }
        let flat = Axis::new("", (0..self.size).map(|from| self.copy(&view.axes, from)).collect());
        let axes = flat.split(sizes, names);
        let other = |axis: &Axis| {
            let mut known = self.axes.iter().chain(&view.axes).chain(self.flat());
            known.any(|known| known.name == axis.name && !known.same_walk(axis))
        };
        if axes.iter().any(|axis| axis.pairs().is_none() || other(axis)) {
            return Err(Status::InvalidArgument);
        }
        self.reshaped.extend(axes.iter().cloned());
        Ok(View { axes, positions: view.positions.clone() })
    }

    /// Returns the ranks at some indices of a dimension as a root of their own, with the view
    /// there; `None` where it is all of them.
    pub fn range(
        &self,
        view: &View,
        dim: &str,
        start: usize,
        len: usize,
        step: usize,
    ) -> Result<Option<(Root, View)>, Refused> {
        let cut = view.axes.iter().find(|axis| axis.name == dim).ok_or(Status::NotFound)?;
        if len == 0 || step == 0 || start + (len - 1) * step >= cut.size() {
            return Err(Status::InvalidArgument);
        }
        if len == cut.size() {
            return Ok(None);
        }
        // The positions are in the order of the digits. The index among the range is where the
        // fastest digit of the axis was.
        let place = cut.pairs().expect("views lie in strides").iter().map(|pair| pair.1).min().unwrap_or(1);
        let index = |position: usize| {
            let steps = cut.coordinate(position).checked_sub(start)?;
            Some(steps / step).filter(|index| steps % step == 0 && *index < len)
        };
        let mut positions: Vec<usize> = (0..self.size).filter(|position| index(*position).is_some()).collect();
        positions.sort_by_key(|position| {
            let base = cut.group(*position)[0];
            (base / place, index(*position), base % place)
        });
        let axes: Vec<Axis> = view.axes.iter().map(|axis| renumbered(axis, &positions)).collect();
        let new = |old: usize| positions.iter().position(|known| *known == old);
        let first = new(cut.group(view.positions[0])[start]).expect("it is in the range");
        let root = Root {
            size: positions.len(),
            axes: axes.clone(),
            ranks: self.ranks_of(&positions),
            position: self.position.and_then(new),
            known: Vec::new(),
            reshaped: Vec::new(),
            inherited: Vec::new(),
            range: Some((positions, cut.clone())),
        };
        let view = View { positions: root.copy(&axes, first), axes };
        Ok(Some((root, view)))
    }

    pub fn concatenate(&self, views: &[&View]) -> Result<View, Refused> {
        let axes: Vec<Axis> = views.iter().flat_map(|view| view.axes.iter().cloned()).collect();
        let names: Vec<&str> = axes.iter().map(|axis| axis.name.as_str()).collect();
        if views.is_empty() || !self.consistent(&axes) || !are_names(&names) {
            return Err(Status::InvalidArgument);
        }
        // All views lie in one array. Otherwise no array has them side by side.
        let positions = self.copy(&axes, views[0].positions[0]);
        match views.iter().all(|view| positions.contains(&view.positions[0])) {
            true => Ok(View { axes, positions }),
            false => Err(Status::InvalidArgument),
        }
    }

    /// Returns all parallel copies of these dimensions, ordered by their first positions.
    pub fn submeshes(&self, view: &View, names: &[&str]) -> Result<Vec<View>, Refused> {
        let axes = self.picked(view, names)?;
        let mut copies: Vec<Vec<usize>> = (0..self.size).map(|from| self.copy(&axes, from)).collect();
        copies.sort();
        copies.dedup();
        Ok(copies.into_iter().map(|positions| View { axes: axes.clone(), positions }).collect())
    }

    /// Returns the text that PyTorch prints for the view.
    pub fn describe(&self, view: &View) -> String {
        let dims: Vec<String> = view.axes.iter().map(|axis| format!("{}={}", axis.name, axis.size())).collect();
        let strides = view.axes.iter().map(|axis| match axis.pairs().expect("views lie in strides").as_slice() {
            [(_, stride)] => stride.to_string(),
            pairs => {
                format!("({})", pairs.iter().map(|(_, stride)| stride.to_string()).collect::<Vec<_>>().join(", "))
            }
        });
        let strides: Vec<String> = strides.collect();
        let comma = if strides.len() == 1 { "," } else { "" };
        format!("DeviceMesh(({}), 'cpu', stride=({}{comma}))", dims.join(", "), strides.join(", "))
    }
}

/// Returns an axis over some of the positions, numbered by their places in the list.
fn renumbered(axis: &Axis, positions: &[usize]) -> Axis {
    let new = |old: &usize| positions.iter().position(|known| known == old);
    let groups = axis.groups.iter().map(|group| group.iter().filter_map(new).collect::<Vec<_>>());
    Axis::new(&axis.name, groups.filter(|group| !group.is_empty()).collect())
}

/// Whether the names are not empty and all different.
fn are_names(names: &[&str]) -> bool {
    (0..names.len()).all(|at| !names[at].is_empty() && !names[..at].contains(&names[at]))
}
