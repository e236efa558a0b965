//! `unsafe` occurs only in listed modules, each use with a `SAFETY:` comment.

use super::{Guard, numbered, words};
use crate::{rust_source::code_only, safety::unexplained, tree::Tree};

/// Folders and files that may use `unsafe`, with the maximum number of uses.
const MODULES: [(&str, usize); 10] = [
    ("crates/tilewright/src/cpu/simd/", usize::MAX),
    ("crates/tilewright/src/tensor/map_file.rs", 1), // the one block that memory-maps
    ("crates/tilewright-cuda/src/driver/", usize::MAX),
    ("crates/tilewright-driver-double/src/", usize::MAX), // C functions of the driver, for tests
    ("crates/tilewright/src/tensor/device.rs", 1),        // the constructor that trusts an address
    ("crates/tilewright-cuda/src/device.rs", 1),          // trusts memory just allocated by the driver
    ("crates/tilewright-cuda/src/simulator.rs", 1),       // trusts addresses that only the simulator accesses
    ("crates/tilewright-python/src/tensor.rs", 4),        // memory of Python objects
    ("crates/tilewright-python/src/dlpack.rs", 4),        // structures and a function of the DLPack protocol
    ("crates/tilewright-python/src/tvm_ffi/abi.rs", 8),   // structures, functions and symbols of TVM-FFI
];

pub(super) const GUARD: Guard = Guard { name: "unsafe", check, planted, clean };

fn check(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in tree.texts(".rs") {
        let code = code_only(text);
        let lines: Vec<usize> = numbered(&code)
            .flat_map(|(number, line)| words(line).filter(|word| *word == "unsafe").map(move |_| number))
            .collect();
        let allowed =
            MODULES.iter().find(|(module, _)| path.starts_with(module)).map_or(0, |(_, times)| *times);
        match lines.get(allowed) {
            Some(line) if allowed == 0 => {
                complaints.push(format!("{path}:{line}: unsafe outside the listed modules"));
            }
            Some(line) => complaints.push(format!("{path}:{line}: unsafe more than {allowed} times")),
            None => complaints.extend(
                unexplained(text)
                    .into_iter()
                    .map(|line| format!("{path}:{line}: unsafe without a comment `SAFETY:`")),
            ),
        }
    }
    complaints
}

fn planted() -> Vec<(Tree, &'static str)> {
    let (simd, map_file) = (MODULES[0].0.to_owned() + "avx2.rs", MODULES[1].0);
    let block = "fn f() { unsafe { g() } }\n";
    let explained = "// SAFETY: g has no preconditions\n".to_owned() + block;
    let file = |path: &str, text: String| Tree::of([(path, text)]);
    vec![
        (
            file("crates/tilewright/src/tensor.rs", explained.clone()),
            "tensor.rs:2: unsafe outside the listed modules",
        ),
        (file("src/main.rs", "unsafe fn f() {}".to_owned()), "main.rs:1: unsafe outside"),
        (file("src/main.rs", "#[unsafe(no_mangle)]".to_owned()), "main.rs:1: unsafe outside"),
        (file(map_file, explained.repeat(2)), "map_file.rs:4: unsafe more than 1 times"),
        (file(&simd, block.to_owned()), "avx2.rs:1: unsafe without"),
        (file(&simd, explained.clone() + block), "avx2.rs:3: unsafe without"),
        (file(&simd, format!("// SAFETY: see the impl.\n{block}")), "avx2.rs:2: unsafe without"),
        (file(&simd, "unsafe impl Send for A {}".to_owned()), "avx2.rs:1: unsafe without"),
        (file(&simd, "let s = \"SAFETY: no\"; unsafe { g() }".to_owned()), "avx2.rs:1: unsafe without"),
    ]
}

fn clean() -> Tree {
    let explained = "// SAFETY: g has no preconditions\nfn f() { unsafe { g() } }\n";
    Tree::of([
        ("crates/tilewright/src/cpu/simd/avx2.rs", format!("unsafe fn g();\n{explained}{explained}")),
        (MODULES[1].0, explained.to_owned()),
        ("src/main.rs", "#![forbid(unsafe_code)] // nothing unsafe\nlet s = \"unsafe { }\";".to_owned()),
    ])
}
