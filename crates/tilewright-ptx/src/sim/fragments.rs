//! `ldmatrix`, `stmatrix` and `mma.sync`: matrices of one warp, at once.

use super::{
    exec::{Exec, Next},
    fault::Trouble,
    lower::Range,
    matrix, traffic,
};
use crate::isa::{
    matrix::{Elements, Matrix},
    memory::Space,
    pure::Lanes,
};

impl Exec<'_, '_> {
    pub(super) fn matrix(&mut self, op: Matrix, results: Range, operands: Range) -> Result<Next, Trouble> {
        match op {
            Matrix::Load(count, transposed) => self.load_matrices((count, transposed), results, operands)?,
            Matrix::Store(count, transposed) => self.store_matrices((count, transposed), operands)?,
            Matrix::Mma(elements) => self.mma(elements, results, operands)?,
            Matrix::Wgmma { .. } => return self.wgmma(op, results, operands),
            Matrix::WgmmaFence => self.warp.products.fences += 1,
            Matrix::WgmmaCommit => {
                let issued = self.warp.products.issued;
                self.warp.products.commits.push_back(issued);
            }
            Matrix::WgmmaWait(left) => return self.wait_products(left),
        }
        Ok(Next::Advance)
    }

    fn mma(&mut self, elements: Elements, results: Range, operands: Range) -> Result<(), Trouble> {
        self.world.report.matrix_instructions += 1;
        let at = |at: usize| *self.operand(operands, at);
        let a = [at(0), at(1), at(2), at(3)];
        let (b, c) = ([at(4), at(5)], [at(6), at(7), at(8), at(9)]);
        let d = matrix::mma(elements, &a, &b, &c);
        for (at, d) in d.iter().enumerate() {
            self.write(self.world.program.regs(results)[at], d)?;
        }
        Ok(())
    }

    /// Conflicts of the rows of each matrix, 8 lanes after the other.
    fn count_rows(&mut self, addresses: &Lanes, count: usize) {
        for matrix in 0..count {
            self.world.report.bank_conflicts += traffic::conflicts(addresses, 0xff << (8 * matrix), 16);
        }
    }

    fn load_matrices(
        &mut self,
        (count, transposed): (usize, bool),
        results: Range,
        operands: Range,
    ) -> Result<(), Trouble> {
        let addresses = self.addresses(operands, 0, false);
        self.count_rows(&addresses, count);
        let mut rows = [[0; 16]; 32];
        for lane in 0..8 * count {
            let spot = self.spot(Space::Shared, addresses[lane], 16, lane)?;
            self.note(false, (spot, 16), lane, self.mark(lane, 0))?;
            self.culprit = 1 << lane;
            rows[lane].copy_from_slice(self.bytes(spot, 16)?);
        }
        self.culprit = self.mask;
        let loaded = matrix::ldmatrix(count, transposed, &rows[..8 * count]);
        for (at, lanes) in loaded.iter().enumerate() {
            self.write(self.world.program.regs(results)[at], lanes)?;
        }
        Ok(())
    }

    fn store_matrices(&mut self, (count, transposed): (usize, bool), operands: Range) -> Result<(), Trouble> {
        let addresses = self.addresses(operands, 0, false);
        self.count_rows(&addresses, count);
        let registers: Vec<Lanes> = (0..count).map(|at| *self.operand(operands, 2 + at)).collect();
        let rows = matrix::stmatrix(count, transposed, &registers);
        for (lane, row) in rows.iter().enumerate() {
            let spot = self.spot(Space::Shared, addresses[lane], 16, lane)?;
            self.note(true, (spot, 16), lane, self.mark(lane, 0))?;
            self.put(spot, row);
        }
        Ok(())
    }
}
