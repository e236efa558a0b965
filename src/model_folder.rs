//! Where the model that ships with the project is.

use std::path::{Path, PathBuf};

const SHIPPED: &str = "models/tilewright-small";

/// The shipped model's folder: below the working directory, beside or above the program, or where it was built.
pub(crate) fn shipped() -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let beside = program.iter().flat_map(|path| path.ancestors().skip(1).take(3));
    let places = [Path::new(".")].into_iter().chain(beside).chain([Path::new(env!("CARGO_MANIFEST_DIR"))]);
    places.map(|place| place.join(SHIPPED)).find(|dir| dir.is_dir())
}
