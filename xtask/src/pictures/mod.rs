//! `cargo xtask pictures`: draws the layouts of docs/tiles.md, from the code that they are layouts of.
//!
//! Nothing is drawn from a formula of its own: fragments are asked of the simulator's products, places in shared memory of
//! kernels that it runs. A test compares the files with what would be drawn now.

mod fragments;
mod matrices;
mod ring;
mod svg;
mod swizzle;

use std::path::Path;

/// The folder, from the root.
const FOLDER: &str = "docs/pictures";

/// Every picture, with the name of its file.
fn all() -> Result<Vec<(&'static str, String)>, String> {
    Ok(vec![
        ("wgmma-accumulator.svg", fragments::accumulator()),
        ("wgmma-a.svg", fragments::left()),
        ("mma-sync.svg", fragments::mma_sync()),
        ("ldmatrix.svg", matrices::loaded(false)?),
        ("ldmatrix-transposed.svg", matrices::loaded(true)?),
        ("swizzle.svg", swizzle::panel()?),
        ("ring.svg", ring::turns()?),
    ])
}

/// Draws all of them, and says which changed.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let folder = root.join(FOLDER);
    let failed = |why: std::io::Error| format!("{FOLDER}: {why}");
    std::fs::create_dir_all(&folder).map_err(failed)?;
    for (file, svg) in all()? {
        let path = folder.join(file);
        let same = std::fs::read_to_string(&path).is_ok_and(|old| old == svg);
        if !same {
            std::fs::write(path, svg).map_err(failed)?;
        }
        println!("{FOLDER}/{file}: {}", if same { "as it was" } else { "drawn anew" });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{FOLDER, all};
    use std::{collections::BTreeSet, path::Path};

    #[test]
    fn files_are_what_the_code_draws() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(FOLDER);
        let entries = std::fs::read_dir(&folder).unwrap();
        let files = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let pictures = all().unwrap();
        let expected: BTreeSet<String> = pictures.iter().map(|(file, _)| (*file).to_owned()).collect();
        assert_eq!(files.collect::<BTreeSet<_>>(), expected, "the files of {FOLDER}");
        for (file, svg) in pictures {
            let old = std::fs::read_to_string(folder.join(file)).unwrap();
            assert!(
                old == svg,
                "{FOLDER}/{file} is not what the code draws; if that is meant: cargo xtask pictures"
            );
        }
    }
}
