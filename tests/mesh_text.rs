//! Meshes as text: the text that is written, the texts that are read, and the texts that are
//! refused, with the words of the refusal. Random meshes and texts are in
//! tests/mesh_text_random.rs.

#[path = "texts/memory.rs"]
mod memory;

use devicemesh::error::Status;
use devicemesh::mesh::{Mesh, MeshSpec, MeshText};

#[test]
fn a_million_ranks_are_less_than_200_bytes() {
    let names = ["pp", "dp", "cp", "tp"];
    let (shape, world_size) = (&[64, 32, 64, 8], 1 << 20);
    let spec = MeshSpec::new("cuda", shape, world_size, 777_777).names(&names);
    let mesh = Mesh::new(&spec).unwrap();
    let text = mesh.serialize();
    let expected = r#"{"devicemesh":1,"device_type":"cuda","shape":[64,32,64,8],"names":["pp","dp","cp","tp"],"layout":[[[64,16384]],[[32,512]],[[64,8]],[[8,1]]],"base":0,"ranks":[[0,1048576]]}"#;
    assert_eq!(text, expected);
    // Nothing is listed on the way in either.
    let again = MeshText::parse(&text).unwrap().mesh(world_size, 5).unwrap();
    assert!(again.rank_map().is_none() && again.equals(&mesh));
    for view in [mesh.slice(&["tp", "pp", "cp"]), mesh.slice(&["cp", "dp"]).unwrap().flatten(Some("both"))] {
        let text = view.unwrap().serialize();
        assert!(text.len() < 200 && text.ends_with(r#""ranks":[[0,1048576]]}"#), "{text}");
    }
    let flat = mesh.flatten(Some("all")).unwrap().serialize();
    assert!(
        MeshText::parse(&flat).unwrap().mesh(world_size, 0).unwrap().rank_map().is_none(),
        "one dimension in order"
    );
}

#[test]
fn ranks_in_strides_are_few_runs() {
    // Even ranks, then odd ones backwards.
    let ranks: Vec<i32> = (0..500).map(|index| 2 * index).chain((0..500).rev().map(|index| 2 * index + 1)).collect();
    let spec = MeshSpec::new("cpu", &[2, 500], 1000, 0).ranks(&ranks);
    let mesh = Mesh::new(&spec).unwrap();
    assert!(mesh.serialize().ends_with(r#""base":0,"ranks":[[0,500,2],[999,500,-2]]}"#), "{}", mesh.serialize());
    // A view of it lists its own ranks only.
    let rows = mesh.submesh(&["dim_1"], 1).unwrap().serialize();
    assert!(rows.ends_with(r#""shape":[500],"names":["dim_1"],"layout":[[[500,1]]],"base":0,"ranks":[[999,500,-2]]}"#));
}

const GOOD: [(&str, &str); 7] = [
    ("devicemesh", "1"),
    ("device_type", r#""cpu""#),
    ("shape", "[2,4]"),
    ("names", r#"["dp","tp"]"#),
    ("layout", "[[[2,4]],[[4,1]]]"),
    ("base", "0"),
    ("ranks", "[[0,8]]"),
];

/// Returns the good text with other values of these keys. An empty value leaves the key out, and
/// an unknown key comes last.
fn with(other: &[(&str, &str)]) -> String {
    let value = |key: &str, good: &str| {
        let found = other.iter().find(|(name, _)| *name == key);
        found.map_or(good, |(_, value)| value).to_owned()
    };
    let known = GOOD.iter().map(|(key, good)| (*key, value(key, good)));
    let unknown = other.iter().filter(|(key, _)| GOOD.iter().all(|(good, _)| good != key));
    let all = known.chain(unknown.map(|(key, value)| (*key, (*value).to_owned())));
    let pairs: Vec<String> =
        all.filter(|(_, value)| !value.is_empty()).map(|(key, value)| format!("\"{key}\": {value}")).collect();
    format!(" {{ {} }}\n", pairs.join(", "))
}

#[track_caller]
fn refused(text: &str, world_size: usize, message: &str) {
    let made = MeshText::parse(text).and_then(|parsed| parsed.mesh(world_size, 0));
    let error = made.expect_err(&format!("expected {message:?} for {text}"));
    assert_eq!(error.status(), Status::InvalidArgument);
    assert!(error.message().contains(message), "expected {message:?}: {error}");
}

#[test]
fn keys_come_in_any_order_and_with_spaces() {
    let backwards: Vec<String> = GOOD.iter().rev().map(|(key, value)| format!("\"{key}\"\t:\n{value}")).collect();
    let text = format!("\n{{{}}}\r\n", backwards.join(" ,\n"));
    assert_eq!(MeshText::parse(&text).unwrap(), MeshText::parse(&with(&[])).unwrap());
    // Pairs may be finer than they need to be, runs too, and a dimension of size 1 may have a pair.
    let fine = [("layout", "[[[2,4],[1,99999999999]],[[2,2],[2,1]]]"), ("ranks", "[[0,3],[3,1],[4,4,1]]")];
    let mesh = MeshText::parse(&with(&fine)).unwrap().mesh(8, 0).unwrap();
    assert_eq!(mesh.ranks(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(mesh.equals(&MeshText::parse(&with(&[])).unwrap().mesh(8, 7).unwrap()));
}

#[test]
fn ranks_are_those_of_the_runs() {
    let ranks = |changes: &[(&str, &str)]| MeshText::parse(&with(changes)).unwrap().mesh(20, 0).unwrap().ranks();
    assert_eq!(ranks(&[("ranks", "[[0,8,2]]")]), [0, 2, 4, 6, 8, 10, 12, 14]);
    assert_eq!(ranks(&[("ranks", "[[19,8,-1]]")]), [19, 18, 17, 16, 15, 14, 13, 12]);
    assert_eq!(ranks(&[("ranks", "[[3,2],[0,1,-7],[5,9]]"), ("base", "1")]), [4, 0, 5, 6, 7, 8, 9, 10]);
    let turned = [("layout", "[[[2,1]],[[2,8],[2,2]]]"), ("base", "1"), ("ranks", "[[4,13]]")];
    assert_eq!(ranks(&turned), [5, 7, 13, 15, 6, 8, 14, 16]);
}

#[test]
fn what_is_wrong_is_said_with_its_values() {
    refused("", 8, "EOF while parsing a value at line 1 column 0");
    refused("mesh", 8, "expected value at line 1 column 1");
    refused(r#"{"devicemesh":1"#, 8, "EOF while parsing an object at line 1 column 15");
    refused(&format!("{}x", with(&[])), 8, "trailing characters at line 2 column 1");
    refused("[1]", 8, "a JSON object is wanted, this is a list");
    refused(r#"[1,"cpu",[2],["dp"],[[[2,1]]],0,[[0,2]]]"#, 8, "at line 1 column");
    refused(&with(&[("devicemesh", "")]), 8, "missing field `devicemesh`");
    refused(&with(&[("devicemesh", "2"), ("shape", "")]), 8, "has version 2, but this library");
    refused(&with(&[("devicemesh", "\"1\"")]), 8, "invalid type: string \"1\", expected u64 at line 1 column");
    for (key, _) in &GOOD[1..] {
        refused(&with(&[(key, "")]), 8, &format!("missing field `{key}`"));
        refused(&with(&[(key, "null")]), 8, "invalid type: null");
        refused(&with(&[(key, "{}")]), 8, "invalid type: map");
        refused(&with(&[(&format!("{key}s"), "1")]), 8, &format!("unknown field `{key}s`"));
        refused(&with(&[(key, &format!("0, \"{key}\": 0"))]), 8, "at line 1 column");
    }
    refused(&with(&[("base", "0, \"base\": 0")]), 8, "duplicate field `base`");

    refused(&with(&[("device_type", r#""""#)]), 8, "got \"\"");
    refused(&with(&[("device_type", r#""cuda:1""#)]), 8, "got \"cuda:1\"");
    refused(&with(&[("device_type", r#""c\u0000u""#)]), 8, "device_type contains a NUL");
    refused(&with(&[("names", r#"["dp","t\u0000p"]"#)]), 8, "names[1] contains a NUL");
    refused(&with(&[("names", r#"["dp",""]"#)]), 8, "the name of dimension 1 is empty");
    refused(&with(&[("names", r#"["dp","dp"]"#)]), 8, "dimension name dp is repeated");
    refused(&with(&[("names", r#"["dp"]"#)]), 8, "shape has 2 elements, names 1, layout 2");
    refused(&with(&[("layout", "[[[2,4]]]")]), 8, "shape has 2 elements, names 2, layout 1");
    refused(&with(&[("names", r#"["dp","\ud800"]"#)]), 8, "at line 1 column");

    refused(&with(&[("shape", "[2,0]")]), 8, "dimension 1 has size 0");
    refused(&with(&[("shape", "[2,-4]")]), 8, "invalid value: integer `-4`");
    refused(&with(&[("shape", "[2,4.0]")]), 8, "invalid type: floating point `4.0`");
    refused(&with(&[("shape", "[2,1e1]")]), 8, "invalid type: floating point `10.0`");
    refused(&with(&[("shape", "[2,18446744073709551616]")]), 8, "invalid type: floating point");
    refused(&with(&[("shape", "[4,18446744073709551615]")]), 8, "does not fit into 64 bits");
    refused(&with(&[("shape", "[65536,65536]")]), 8, "shape has 4294967296 ranks; a mesh has at most 2147483647");
    refused(&with(&[("shape", "[2,1073741824]")]), 8, "shape has 2147483648 ranks; a mesh has at most 2147483647");
    refused(&with(&[("shape", "[2,3]")]), 8, "layout[1] walks 4 ranks, but shape[1] is 3");
    refused(
        &with(&[("layout", "[[[2,4]],[[4294967296,1],[4294967296,1]]]")]),
        8,
        "layout[1] walks more than 2^64 ranks",
    );
    refused(&with(&[("layout", "[[[2,4]],[[4,0]]]")]), 8, "layout[1] has 4 steps of stride 0");
    refused(&with(&[("layout", "[[[2,4]],[[4]]]")]), 8, "invalid length 1");
    refused(&with(&[("layout", "[[[2,4]],[[4,1,1]]]")]), 8, "at line 1 column");
    refused(&with(&[("layout", "[[[2,2]],[[4,1]]]")]), 8, "the steps [2,2], [4,1], which overlap");
    refused(&with(&[("layout", "[[[2,1]],[[4,1]]]")]), 8, "which overlap");
    refused(&with(&[("layout", "[[[2,5]],[[4,1]]]"), ("ranks", "[[0,9]]")]), 9, "which overlap");
    refused(
        &with(&[("layout", "[[[2,8]],[[4,1]]]")]),
        8,
        "the layout reaches position 11, but ranks lists only 8 ranks (positions count from 0)",
    );
    refused(&with(&[("base", "1")]), 8, "the layout reaches position 8, but ranks");
    refused(&with(&[("base", "18446744073709551615")]), 8, "the layout reaches position 18446744073709551622");
    refused(
        &with(&[("layout", "[[[2,18446744073709551615]],[[4,18446744073709551615]]]")]),
        8,
        "the layout reaches position",
    );

    refused(&with(&[("ranks", "[]")]), 8, "ranks lists only 0 ranks");
    refused(&with(&[("ranks", "[8]")]), 8, "expected a run of ranks, [first, count] or [first, count, step]");
    refused(&with(&[("ranks", "[[]]")]), 8, "invalid length 0, expected a run of ranks");
    refused(&with(&[("ranks", "[[8]]")]), 8, "invalid length 1, expected a run of ranks");
    refused(&with(&[("ranks", "[[0,8,1,1]]")]), 8, "invalid length 4, expected a run of ranks");
    refused(&with(&[("ranks", "[[0,8],[9,0]]")]), 8, "ranks[1] is [9,0]: its count is at least 1");
    refused(&with(&[("ranks", "[[0,8,0]]")]), 8, "ranks[0] is [0,8,0]");
    refused(
        &with(&[("ranks", "[[-1,8]]")]),
        8,
        "ranks[0] is [-1,8], from rank -1 to rank 6; ranks are 0 to 2147483646",
    );
    refused(&with(&[("ranks", "[[5,8,-1]]")]), 8, "from rank 5 to rank -2");
    refused(&with(&[("ranks", "[[2147483640,8]]")]), 8, "from rank 2147483640 to rank 2147483647");
    refused(
        &with(&[("ranks", "[[9223372036854775807,18446744073709551615,9223372036854775807]]")]),
        8,
        "to rank 170141183460469231704017187605319778305",
    );
    refused(
        &with(&[("ranks", "[[-9223372036854775808,18446744073709551615,-9223372036854775808]]")]),
        8,
        "to rank -170141183460469231722463931679029329920",
    );
    refused(&with(&[("ranks", "[[0,2147483647],[0,1]]")]), 8, "ranks has 2147483648 ranks up to ranks[1]");
    refused(&with(&[("ranks", "[[0,4],[3,4]]")]), 8, "rank 3 is listed twice, at index 3 and index 4");
    refused(&with(&[("ranks", "[[1,8]]")]), 8, "rank 8 at index 7 is out of range: the world has ranks 0 to 7");
    refused(&with(&[]), 7, "has 8 ranks, but the world has 7");
}

#[test]
fn small_texts_and_large_ones_cost_what_they_are() {
    // Two billion ranks that are not in order, in a small world.
    let turned =
        with(&[("shape", "[32768,65535]"), ("layout", "[[[32768,1]],[[65535,32768]]]"), ("ranks", "[[0,2147450880]]")]);
    refused(&turned, 8, "has 2147450880 ranks, but the world has 8");
    let large = with(&[("ranks", "[[0,2147483647]]")]);
    assert_eq!(MeshText::parse(&large).unwrap().mesh(8, 0).unwrap().size(), 8);
    let far = with(&[("ranks", "[[0,2147483647]]"), ("base", "2147483639")]);
    refused(&far, 8, "rank 2147483639 at index 0 is out of range");

    // Depth, and many of everything.
    let deep = "[".repeat(1 << 20);
    for key in ["devicemesh", "device_type", "shape", "names", "layout", "ranks", "other"] {
        refused(&with(&[(key, &deep)]), 8, "at line 1 column");
    }
    let many = |element: &str| format!("[{}]", vec![element; 65_537].join(","));
    let names = format!("[{}]", (0..65_537).map(|index| format!("\"d{index}\"")).collect::<Vec<_>>().join(","));
    let wide = [("shape", &*many("1")), ("names", &*names), ("layout", &*many("[]")), ("ranks", "[[0,1]]")];
    refused(
        &with(&wide),
        8,
        "shape has 65537 elements, names 65537, layout 65537: each has one per dimension, at most 65536",
    );
    let long = "x".repeat(1 << 20);
    let error = MeshText::parse(&with(&[("shape", &format!("\"{long}\""))])).unwrap_err();
    assert!(error.message().len() < 400 && error.message().contains("... at line 1 column"), "{error}");
    memory::check_largest();
}
