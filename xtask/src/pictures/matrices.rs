//! `ldmatrix`: whose addresses give the rows, and who gets which element.
//!
//! A warp writes 32 rows of 16 bytes whose elements name their own places, and loads them as four matrices.

use super::svg::{Canvas, Colour, Raster};
use tilewright_ptx::{
    build::Builder,
    sim::{Arg, Launch, Memory},
};

/// What lane `lane` gets of matrix `matrix`: two elements, by the lane that gave their row's address, and column.
type Loaded = Vec<Vec<[(usize, usize); 2]>>;

fn load(transposed: bool) -> Result<Loaded, String> {
    let kernel = Builder::kernel("matrices", 32, |k| {
        let out = k.global::<u32>("out");
        let rows = k.shared::<u16>("rows", 32 * 8, 16);
        let lane = k.lane();
        let row = rows.at(lane * 8).cast::<u32>();
        for pair in 0..4 {
            let first = lane * 8 + 2 * pair;
            row.plus(pair as usize).store(first | ((first + 1) << 16));
        }
        k.sync_warp();
        let matrices = k.load_matrix::<4, _>(row, transposed);
        out.at(lane * 4).store_vector(matrices);
    });
    let mut memory = Memory::new();
    let out = memory.alloc(32 * 16);
    let kernel = kernel.map_err(|why| why.to_string())?;
    let launch = Launch { kernel: &kernel, grid: [1, 1, 1], args: &[Arg::U64(out)], seed: 0 };
    launch.run(&mut memory).map_err(|fault| fault.to_string())?;
    let words = memory.read::<u32>(out, 32 * 4).map_err(|fault| fault.to_string())?;
    let name = |half: u32| (half as usize / 8, half as usize % 8);
    let of = |matrix: usize, lane: usize| {
        let word = words[4 * lane + matrix];
        [name(word & 0xffff), name(word >> 16)]
    };
    Ok((0..4).map(|matrix| (0..32).map(|lane| of(matrix, lane)).collect()).collect())
}

/// The picture of all four matrices.
pub(super) fn loaded(transposed: bool) -> Result<String, String> {
    let loaded = load(transposed)?;
    let (title, explained) = if transposed {
        (
            "ldmatrix.x4.trans: the same rows, dealt by columns",
            "As above, but a register's two elements lie one below the other.",
        )
    } else {
        (
            "ldmatrix.x4: four matrices of 8 rows of 16 bytes",
            "At the left the lane whose address gives the row; in a cell the lane that gets the element, and in which half \
             of its register.",
        )
    };
    let mut canvas = Canvas::new((890, 480), title, explained);
    for (matrix, lanes) in loaded.iter().enumerate() {
        let (x, y) = (80 + 420 * (matrix % 2), 100 + 195 * (matrix / 2));
        let raster = Raster { corner: (x, y), cell: (46, 20) };
        canvas.heading((x, y - 18), &format!("register {matrix}"));
        let first = lanes.iter().flatten().map(|(row, _)| *row).min().unwrap_or_default();
        for (lane, halves) in lanes.iter().enumerate() {
            for ((row, column), half) in halves.iter().zip(["lo", "hi"]) {
                let area = raster.at(row - first, *column);
                canvas.cell(area, Colour::of_lane(lane), &format!("{lane} {half}"));
            }
        }
        for row in 0..8 {
            let area = raster.at(row, 0);
            canvas.note((x - 6, area.y + 14), "end", &format!("lane {}", first + row));
        }
    }
    Ok(canvas.finish())
}
