// Line icons on a grid of 24.
const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  search: "M11 4a7 7 0 1 0 0 14a7 7 0 0 0 0-14zM16 16l4.5 4.5",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  play: "M8 5l11 7-11 7z",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  sliders: "M4 8h10M18 8h2M4 16h2M10 16h10M14 6v4h4V6zM6 14v4h4v-4z",
  chart: "M4 20V4M4 20h16M8 16v-4M12 16V8M16 16v-6",
  gear: "M12 9a3 3 0 1 0 0 6a3 3 0 0 0 0-6zM12 3v3M12 18v3M3 12h3M18 12h3M5.6 5.6l2.2 2.2M16.2 16.2l2.2 2.2M18.4 5.6l-2.2 2.2M7.8 16.2l-2.2 2.2",
  tool: "M14 6a4 4 0 0 1 5-2l-2.500 2.500 1 2 2 1L22 7a4 4 0 0 1-5.500 4.800L9 19.300a2 2 0 0 1-3-3l7.600-7.400",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  chat: "M5 5h14v11h-8l-4 4v-4H5z",
  check: "M5 13l4 4L19 7",
} as const;

export type IconName = keyof typeof PATHS;

const SVG = "http://www.w3.org/2000/svg";

/** The same picture without Preact. */
export function icon(name: IconName): SVGElement {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

export function Icon({ name }: { name: IconName }) {
  return (
    <svg viewBox="0 0 24 24" class="icon" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

export function Logo() {
  return (
    <svg viewBox="0 0 32 32" class="logo" aria-hidden="true">
      <rect width="32" height="32" rx="8" />
      <path d="M10 7v18M22 8 12 16l10 9" />
    </svg>
  );
}
