/** The findings with their cost and evidence; a click shows the place of a finding. */
import type { Store } from "../../store";

export function FindingsPanel({ store }: { store: Store }) {
  return (
    <>
      <table class="findings">
        <thead>
          <tr>
            <th scope="col">Finding</th>
            <th scope="col" class="number">
              ms a step
            </th>
            <th scope="col" class="number">
              %
            </th>
            <th scope="col">Evidence</th>
          </tr>
        </thead>
        <tbody>
          {store.trace.findings.map((finding) => {
            const { what, where, ns_per_step, share, evidence, next } = finding;
            return (
              <tr key={`${where} ${what}`}>
                <th scope="row">
                  <button
                    type="button"
                    class="link"
                    title="Show where it is"
                    onClick={() => store.showFinding(finding)}
                  >
                    <bdi>{where}</bdi> {what}
                  </button>
                </th>
                <td class="number">{ns_per_step > 0 && (ns_per_step / 1e6).toFixed(3)}</td>
                <td class="number">{ns_per_step > 0 && (share * 100).toFixed(1)}</td>
                <td>
                  {evidence}
                  <small>{next}</small>
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
      <p class="hint">{store.trace.findingsEnd}</p>
    </>
  );
}
