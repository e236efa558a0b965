//! Fragments in registers, found by products whose sums and elements name their own places.

use super::svg::{Area, Canvas, Colour, Raster};
use std::collections::BTreeMap;
use tilewright_kernels::tile::{Sums, sums};
use tilewright_ptx::{
    build::Builder,
    isa::{matrix::Elements, pure::Lanes, types::Scalar},
    sim::matrix::{Row, columns_of, mma, rows_of, wgmma},
};

/// Who holds each element: `[row][column]`.
type Holders = Vec<Vec<Holder>>;

/// Where an element is: a lane of a warp, its register, and for elements of 16 bits the half of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Holder {
    warp: usize,
    lane: usize,
    register: usize,
    half: Option<usize>,
}

impl Holder {
    /// Its place in a list of the thread's elements.
    fn element(self) -> usize {
        self.half.map_or(self.register, |half| 2 * self.register + half)
    }
}

/// Elements of 16 bits that say where they are: register by register, lane by lane.
fn named_elements<const N: usize>() -> [Lanes; N] {
    let name = |register: usize, lane: usize, half: usize| (register << 6 | lane << 1 | half) as u64;
    std::array::from_fn(|register| {
        std::array::from_fn(|lane| name(register, lane, 0) | name(register, lane, 1) << 16)
    })
}

/// Who holds the elements of rows that were made of [`named_elements`].
fn holders(rows: &[Row]) -> Holders {
    let holder = |bytes: &[u8]| {
        let name = usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
        Holder { warp: 0, lane: name >> 1 & 31, register: name >> 6, half: Some(name & 1) }
    };
    rows.iter().map(|row| row.chunks_exact(2).map(holder).collect()).collect()
}

/// A row whose first two elements are these whole numbers below 256, as bf16, which is the upper half of an f32.
fn row_of(first: usize, second: usize) -> Row {
    let mut row = [0; 32];
    for (to, number) in row.chunks_exact_mut(2).zip([first, second]) {
        to.copy_from_slice(&((number as f32).to_bits() >> 16).to_le_bytes()[..2]);
    }
    row
}

/// The rows of A and columns of B whose product in row `r` and column `c` is `columns · r + c`.
fn naming(rows: usize, columns: usize) -> (Vec<Row>, Vec<Row>) {
    let a = (0..rows).map(|row| row_of(row, 1)).collect();
    let b = (0..columns).map(|column| row_of(columns, column)).collect();
    (a, b)
}

/// Who holds the sums of a product of [`naming`], whose registers are `[warp][register]`.
fn holders_of_sums(registers: &[Vec<Lanes>], (rows, columns): (usize, usize)) -> Holders {
    let mut holders = vec![vec![Holder::default(); columns]; rows];
    for (warp, registers) in registers.iter().enumerate() {
        for (register, lanes) in registers.iter().enumerate() {
            for (lane, &bits) in lanes.iter().enumerate() {
                let name = f32::from_bits(bits as u32) as usize;
                holders[name / columns][name % columns] = Holder { warp, lane, register, half: None };
            }
        }
    }
    holders
}

/// Draws who holds what: the lane, then `letter` and the element of its list.
fn draw(canvas: &mut Canvas, raster: Raster, holders: &[Vec<Holder>], letter: &str) {
    for (row, holders) in holders.iter().enumerate() {
        for (column, holder) in holders.iter().enumerate() {
            let text = format!("{} {letter}{}", holder.lane, holder.element());
            canvas.cell(raster.at(row, column), Colour::of_lane(holder.lane), &text);
        }
    }
    raster.numbered(canvas, holders.len(), holders.first().map_or(0, Vec::len));
    let own: BTreeMap<usize, Area> = holders
        .iter()
        .enumerate()
        .flat_map(|(row, holders)| holders.iter().enumerate().map(move |at| (row, at)))
        .filter(|(_, (_, holder))| holder.lane == 5)
        .map(|(row, (column, holder))| (holder.element(), raster.at(row, column)))
        .collect();
    own.values().for_each(|area| canvas.frame(*area));
}

/// The 64 rows of a warpgroup at the left, by warps.
fn draw_warps(canvas: &mut Canvas, corner: (usize, usize), rows_of_warps: &[Vec<usize>]) {
    let raster = Raster { corner, cell: (70, 5) };
    for (warp, rows) in rows_of_warps.iter().enumerate() {
        let (first, last) = (rows[0], rows[rows.len() - 1]);
        let text = format!("warp {warp}");
        let area = raster.span((first, 0), (rows.len(), 1));
        canvas.cell(area, Colour::of(2 * warp), &text);
        canvas.note((corner.0 + 35, area.y + area.height - 8), "middle", &format!("rows {first} to {last}"));
    }
}

/// The accumulator of `wgmma`: 64 rows and 16 columns. What [`Sums`] says is compared with what the product does.
pub(super) fn accumulator() -> String {
    const COLUMNS: usize = 16;
    let (a, b) = naming(64, COLUMNS);
    let mut registers = vec![vec![[0; 32]; COLUMNS / 2]; 4];
    if let [w0, w1, w2, w3] = &mut registers[..] {
        wgmma((Elements::Bf16, Elements::Bf16), &a, &b, [w0, w1, w2, w3], false);
    }
    let holders = holders_of_sums(&registers, (64, COLUMNS));
    agree(&holders);
    let of_warp = |warp| (0..64).filter(|&row| holders[row][0].warp == warp).collect();
    let warps: Vec<Vec<usize>> = (0..4).map(of_warp).collect();
    let mut canvas = Canvas::new(
        (880, 480),
        "The accumulator of wgmma: who holds which sum",
        "A warpgroup's 64 rows at the left; the rows of warp 0 and 16 columns. \"5 d2\" is register d2 of lane 5 (framed).",
    );
    draw_warps(&mut canvas, (20, 90), &warps);
    let raster = Raster { corner: (130, 90), cell: (46, 22) };
    draw(&mut canvas, raster, &holders[..16], "d");
    canvas.label(
        (130, 465),
        "Eight columns more are four registers more: d8 lies 8 columns to the right of d4.",
    );
    canvas.finish()
}

/// Holds what kernels believe of sums, in [`Sums::place`] and beside it, against what the product does.
fn agree(holders: &[Vec<Holder>]) {
    let mut believed = Vec::new();
    let kernel = Builder::kernel("places", 128, |k| {
        for thread in 0..128 {
            let known =
                |value: tilewright_ptx::build::Value<'_, u32>| value.known().unwrap_or(u32::MAX) as usize;
            let thread = k.constant(thread);
            believed.push((known(sums::first_row(thread)), known(sums::first_column(thread))));
        }
    });
    assert!(kernel.is_ok(), "nothing is recorded");
    for (row, holders) in holders.iter().enumerate() {
        for (column, holder) in holders.iter().enumerate() {
            let (first_row, first_column) = believed[32 * holder.warp + holder.lane];
            let place = Sums::place(holder.register);
            let told = (first_row + 8 * place.half, first_column + place.column);
            assert_eq!(told, (row, column), "{holder:?}");
        }
    }
}

/// The left side of `wgmma` in registers: 64 rows and 16 columns of 16-bit elements.
pub(super) fn left() -> String {
    let holders = holders(&rows_of(&named_elements::<4>()));
    let mut canvas = Canvas::new(
        (880, 480),
        "A of wgmma in registers, 16-bit elements, one step of depth",
        "The 16 rows of warp 0; the other warps hold theirs in the same way. \"5 a2\" is element 2 of lane 5: \
         the low half of its second register.",
    );
    let raster = Raster { corner: (90, 90), cell: (48, 22) };
    draw(&mut canvas, raster, &holders, "a");
    canvas.label(
        (90, 465),
        "A lane's elements 2 i and 2 i + 1 are the low and high half of its register i. \
         The places are those of an accumulator of 16 columns.",
    );
    canvas.finish()
}

/// All three fragments of `mma.sync` with 16-bit elements: B above, A at the left, C and D below B.
pub(super) fn mma_sync() -> String {
    let rows = holders(&rows_of(&named_elements::<4>()));
    let columns = holders(&columns_of(&named_elements::<2>()));
    let across: Holders = (0..16).map(|depth| columns.iter().map(|column| column[depth]).collect()).collect();
    let mut canvas = Canvas::new(
        (890, 840),
        "mma.sync m16n8k16: fragments A, B and C of a warp",
        "The lane, and which of its elements: a0 to a7, b0 to b3 (two in a register), c0 to c3 (one in a register). \
         Lane 5 is framed.",
    );
    let (left, middle) = (35, 610);
    let depth = Elements::Bf16.depth();
    canvas.heading((left, 200), &format!("D = A · B + C: 16 rows, 8 columns, depth {depth}"));
    canvas
        .label((left, 225), "A colour is four lanes side by side, which hold two rows of A, of C and of D,");
    canvas.label((left, 243), "and a column of B. Elements 2 i and 2 i + 1 of A and B are the low and high");
    canvas.label((left, 261), "half of register i; sums are f32 and have a register each.");
    canvas.heading((middle, 75), "B, 16 by 8");
    draw(&mut canvas, Raster { corner: (middle, 95), cell: (33, 22) }, &across, "b");
    canvas.heading((left, 465), "A, 16 by 16");
    draw(&mut canvas, Raster { corner: (left, 485), cell: (33, 20) }, &rows, "a");
    canvas.heading((middle, 465), "C and D, 16 by 8");
    draw(&mut canvas, Raster { corner: (middle, 485), cell: (33, 20) }, &sums_of_mma(), "c");
    canvas.finish()
}

/// Who holds the sums of `mma.sync`.
fn sums_of_mma() -> Holders {
    let (a, b) = naming(16, 8);
    let (in_a, in_b) =
        (holders(&rows_of(&named_elements::<4>())), holders(&columns_of(&named_elements::<2>())));
    let (mut of_a, mut of_b) = ([[0; 32]; 4], [[0; 32]; 2]);
    place(&a, &in_a, &mut of_a);
    place(&b, &in_b, &mut of_b);
    let sums = mma(Elements::Bf16, &of_a, &of_b, &[[0.0_f32.bits(); 32]; 4]);
    holders_of_sums(&[sums.to_vec()], (16, 8))
}

/// Puts rows into the registers that hold them.
fn place(rows: &[Row], holders: &[Vec<Holder>], registers: &mut [Lanes]) {
    for (row, holders) in rows.iter().zip(holders) {
        for (element, holder) in row.chunks_exact(2).zip(holders) {
            let bits = u64::from(u16::from_le_bytes([element[0], element[1]]));
            registers[holder.register][holder.lane] |= bits << (16 * holder.half.unwrap_or_default());
        }
    }
}
