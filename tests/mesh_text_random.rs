//! Meshes as text. The library, and a reader that knows only the format, read every text that the
//! library has written. Texts that nobody wrote do no harm.

mod corpus;
#[path = "texts/memory.rs"]
mod memory;
mod texts;

use devicemesh::mesh::{Mesh, MeshSpec, MeshText};
use proptest::prelude::*;
use proptest::sample::Index;

fn config(cases: u32) -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(cases),
    }
}

/// A root mesh of distinct ranks of a world that may have more, and a view of it.
#[derive(Debug, Clone)]
struct Case {
    shape: Vec<usize>,
    spare: usize,
    seed: Option<u64>,
    who: Index,
    steps: Vec<Step>,
}

#[derive(Debug, Clone)]
enum Step {
    Slice(Vec<Index>),
    Submesh(Vec<Index>, Index),
    Flatten,
    Unflatten(Index, usize),
    Concatenate(Index, Index),
}

fn cases() -> impl Strategy<Value = Case> {
    let index = any::<Index>;
    let picks = move || prop::collection::vec(index(), 0..4);
    let step = prop_oneof![
        picks().prop_map(Step::Slice),
        (picks(), index()).prop_map(|(picks, copy)| Step::Submesh(picks, copy)),
        Just(Step::Flatten),
        (index(), 1..6usize).prop_map(|(dim, factor)| Step::Unflatten(dim, factor)),
        (index(), index()).prop_map(|(one, other)| Step::Concatenate(one, other)),
    ];
    let shape = prop::collection::vec(1..5usize, 0..5);
    let steps = prop::collection::vec(step, 0..5);
    (shape, 0..20usize, prop::option::of(any::<u64>()), index(), steps)
        .prop_map(|(shape, spare, seed, who, steps)| Case { shape, spare, seed, who, steps })
}

impl Case {
    fn world(&self) -> usize {
        self.shape.iter().product::<usize>() + self.spare
    }

    fn rank(&self) -> usize {
        self.who.index(self.world())
    }

    /// Steps that do not fit what is there are left out.
    fn view(&self) -> Mesh {
        let size: usize = self.shape.iter().product();
        let ranks = self.seed.map(|seed| shuffled(self.world(), size, seed));
        let names: Vec<String> = (0..self.shape.len()).map(|dim| format!("d{dim} \"é\u{1}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut spec = MeshSpec::new("cpu", &self.shape, self.world(), self.rank()).names(&names);
        spec.ranks = ranks.as_deref();
        let mut mesh = Mesh::new(&spec).unwrap();
        for (number, step) in self.steps.iter().enumerate() {
            let names: Vec<String> = mesh.dim_names().iter().map(|name| (*name).to_owned()).collect();
            let pick = |picks: &[Index]| picks.iter().filter_map(|pick| some(&names, pick)).collect::<Vec<_>>();
            let next = match step {
                Step::Slice(picks) => mesh.slice(&pick(picks)),
                Step::Submesh(picks, copy) => {
                    mesh.submesh_count(&pick(picks)).and_then(|copies| mesh.submesh(&pick(picks), copy.index(copies)))
                }
                Step::Flatten => mesh.flatten(Some(&format!("f{number}"))),
                Step::Unflatten(dim, factor) => match some(&names, dim) {
                    Some(name) => {
                        let size = mesh.dim_size(mesh.dim_index(name).unwrap());
                        mesh.unflatten(name, &[size / factor, *factor], &[&format!("o{number}"), &format!("i{number}")])
                    }
                    None => continue,
                },
                Step::Concatenate(one, other) => {
                    let parts =
                        [one, other].map(|pick| mesh.slice(&some(&names, pick).into_iter().collect::<Vec<_>>()));
                    match parts {
                        [Ok(one), Ok(other)] => Mesh::concatenate(&[&one, &other]),
                        _ => continue,
                    }
                }
            };
            mesh = next.unwrap_or(mesh);
        }
        mesh
    }
}

fn some<'a>(names: &'a [String], pick: &Index) -> Option<&'a str> {
    (!names.is_empty()).then(|| &*names[pick.index(names.len())])
}

/// `size` ranks of a world: those of even seeds in stretches, so that there are runs.
fn shuffled(world: usize, size: usize, seed: u64) -> Vec<i32> {
    let mut ranks: Vec<i32> = (0..world as i32).collect();
    let mut state = seed;
    for at in (1..world).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match seed % 4 {
            0 => ranks.rotate_left((state >> 33) as usize % world * usize::from(at % 4 == 0)),
            2 => ranks[..at].reverse(),
            _ => ranks.swap(at, (state >> 33) as usize % (at + 1)),
        }
    }
    ranks.truncate(size);
    ranks
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn a_mesh_that_was_written_is_read_again(case in cases()) {
        let view = case.view();
        let text = view.serialize();
        prop_assert!(!text.contains(|character: char| character.is_control()), "one line, and no NUL: {}", text);
        prop_assert_eq!(texts::read(&text), view.ranks().iter().map(|rank| i64::from(*rank)).collect::<Vec<_>>(), "{}", text);
        let parsed = MeshText::parse(&text).unwrap();
        prop_assert_eq!(parsed.to_string(), text);
        let again = parsed.mesh(case.world(), case.rank()).unwrap();
        texts::same(&view, &again);
        prop_assert_eq!(again.root().size(), again.size(), "a root");
        prop_assert_eq!(again.is_member(), view.is_member());
        // From then on the text stays the same.
        let second = again.serialize();
        let third = MeshText::parse(&second).unwrap().mesh(case.world(), case.rank()).unwrap();
        prop_assert_eq!(&third.serialize(), &second);
        texts::same(&third, &view);
    }
}

/// One change of a text.
#[derive(Debug, Clone)]
enum Change {
    Number(Index, u64, bool),
    Byte(Index, u8),
    Cut(Index, Index),
    Repeat(Index, Index),
    Move(Index, Index, Index),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let index = any::<Index>;
    let edges = [0, 1, 2, 3, 7, 8, (1 << 31) - 2, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, u64::MAX];
    let number = prop_oneof![3 => 0..12u64, 1 => prop::sample::select(edges.to_vec())];
    let byte = prop::sample::select(br#"[]{},:"0123456789-.eE\u "#.to_vec());
    let change = prop_oneof![
        6 => (index(), number, prop::bool::weighted(0.1)).prop_map(|(at, number, minus)| Change::Number(at, number, minus)),
        1 => (index(), byte).prop_map(|(at, byte)| Change::Byte(at, byte)),
        1 => (index(), index()).prop_map(|(from, to)| Change::Cut(from, to)),
        1 => (index(), index()).prop_map(|(from, to)| Change::Repeat(from, to)),
        1 => (index(), index(), index()).prop_map(|(from, to, at)| Change::Move(from, to, at)),
    ];
    prop::collection::vec(change, 1..6)
}

/// Returns the pieces of a text, such as numbers, brackets and strings, so that a changed text
/// mostly is JSON still.
fn pieces(text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    for character in text.chars() {
        match pieces.last_mut() {
            Some(last) if character.is_alphanumeric() && last.ends_with(char::is_alphanumeric) => last.push(character),
            _ => pieces.push(character.into()),
        }
    }
    pieces
}

fn changed(text: &str, changes: &[Change]) -> String {
    let mut list = pieces(text);
    for change in changes {
        if list.is_empty() {
            break;
        }
        let span = |from: &Index, to: &Index| {
            let (from, to) = (from.index(list.len()), to.index(list.len()));
            // Short stretches: a run, a pair.
            from.min(to)..from.max(to).min(from.min(to) + 8)
        };
        match change {
            Change::Number(at, number, minus) => {
                let numbers: Vec<usize> =
                    (0..list.len()).filter(|at| list[*at].starts_with(|first: char| first.is_ascii_digit())).collect();
                if !numbers.is_empty() {
                    list[numbers[at.index(numbers.len())]] = format!("{}{number}", if *minus { "-" } else { "" });
                }
            }
            Change::Byte(at, byte) => {
                let at = at.index(list.len());
                list[at] = char::from(*byte).into();
            }
            Change::Cut(from, to) => drop(list.drain(span(from, to))),
            Change::Repeat(from, to) => {
                let span = span(from, to);
                let copy = list[span.clone()].to_vec();
                list.splice(span.start..span.start, copy);
            }
            Change::Move(from, to, at) => {
                let taken: Vec<String> = list.drain(span(from, to)).collect();
                let at = at.index(list.len() + 1);
                list.splice(at..at, taken);
            }
        }
    }
    list.concat()
}

proptest! {
    #![proptest_config(config(4096))]

    /// `PROPTEST_CASES=100000 cargo test --test mesh_text_random texts_that` looks longer.
    #[test]
    fn texts_that_nobody_wrote_are_refused_or_mean_what_they_say(case in cases(), changes in changes()) {
        let text = changed(&case.view().serialize(), &changes);
        texts::check_any_text(&text, case.world(), case.rank());
        memory::check_largest();
    }
}

#[test]
fn what_the_fuzzer_found_stays_mended() {
    let inputs = corpus::inputs("mesh_text");
    for (place, bytes) in &inputs {
        println!("{place}");
        if let Ok(text) = std::str::from_utf8(bytes) {
            texts::check_any_text(text, 64, 5);
        }
    }
    assert!(inputs.len() >= 10, "{} inputs", inputs.len());
}
